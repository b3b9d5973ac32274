"""Kernels on a CUDA device against the torch twins on the CPU: the same bits, deviation aside."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from cases import KERNELS, calls, copied, written
from hypothesis import given

from kvtrie import ModelShape
from kvtrie.kernels import Pages, Rope, copy_rows, gather, recompute, scatter, twin
from kvtrie.kernels.launch import launch
from kvtrie.model.layout import Layout
from kvtrie.tiers import Pool

pytestmark = pytest.mark.gpu


def moved(thing, device, memo):
    """A call with all tensors on a device; those that shared a memory still do."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        if not storage.nbytes():
            return thing.to(device)
        if storage.data_ptr() not in memo:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            memo[storage.data_ptr()] = whole.to(device)
        flat = memo[storage.data_ptr()].view(thing.dtype)
        return flat.as_strided(thing.shape, thing.stride(), thing.storage_offset())
    if isinstance(thing, tuple):
        return tuple(moved(each, device, memo) for each in thing)
    if is_dataclass(thing):
        named = {each.name: getattr(thing, each.name) for each in fields(thing)}
        return replace(thing, **{name: moved(each, device, memo) for name, each in named.items()})
    return thing


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_do_what_twins_do(kernel):
    @given(calls(kernel=kernel))
    def check(made):
        theirs, memo = copied(made), {}
        for call, other in zip(made, theirs, strict=True):
            on_gpu = moved(call, "cuda", memo)
            launch(on_gpu)
            twin.run(other)
            for mine, its in zip(written(on_gpu), written(other), strict=True):
                assert torch.equal(mine.cpu(), its)
            if other.deviation is not None:
                torch.testing.assert_close(
                    on_gpu.deviation.cpu(), other.deviation, rtol=1e-5, atol=1e-7
                )

    check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (32, 64), (2, 256), (40, 96), (1, 576)])
def test_real_sizes(dtype, heads, dim):
    torch.manual_seed(0)
    quantised = dtype in {"float8_e4m3fn", "int8"}
    latent = dim == 576
    layout = Layout(dtype=dtype, scales="group" if quantised else "none", latent=latent)
    sizes = {"blocks": 64, "block_tokens": 16, "heads": heads, "head_dim": dim}
    [size] = layout.planes(16, heads, dim)
    on_gpu = torch.zeros(64 * size, dtype=torch.uint8, device="cuda")
    on_device = Pages.of([on_gpu], layout, **sizes)
    on_host = Pages.of([torch.zeros(64 * size, dtype=torch.uint8)], layout, **sizes)
    slots, positions = torch.randperm(1024)[:777], torch.randint(0, 4096, (777,))
    fresh = [torch.randn(777, heads, dim).bfloat16() for _ in on_host.planes]
    rope = Rope.of(4096, 64, first=dim - 64, neighbours=latent)
    device_rope = replace(rope, cos=rope.cos.cuda(), sin=rope.sin.cuda())
    said = recompute(on_host, slots, *fresh, positions=positions, rope=rope, deviation=True)
    also = recompute(
        on_device,
        slots.cuda(),
        *(each.cuda() for each in fresh),
        positions=positions.cuda(),
        rope=device_rope,
        deviation=True,
    )
    assert not also.skipped.any()
    torch.testing.assert_close(also.deviation.cpu(), said.deviation, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(on_device.planes, on_host.planes, strict=True):
        word = torch.uint8 if quantised else {2: torch.int16, 4: torch.int32}[mine.cells.itemsize]
        assert torch.equal(mine.cells.cpu().view(word), theirs.cells.view(word))
        if quantised:
            assert torch.equal(mine.scales.cpu(), theirs.scales)


def test_slots_on_the_device_are_skipped_with_a_flag():
    layout = Layout(dtype="bfloat16")
    memory = [torch.zeros(4 * layout.planes(16, 8, 128)[0], dtype=torch.uint8, device="cuda")]
    pages = Pages.of(memory, layout, blocks=4, block_tokens=16, heads=8, head_dim=128)
    rows = torch.ones(4, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([5, -1, 64, 2**40], device="cuda")
    assert scatter(pages, slots, rows, rows).tolist() == [0, 1, 1, 1]
    cells = pages.planes[0].cells.reshape(64, -1)
    assert cells[5].all()
    assert not cells[torch.arange(64, device="cuda") != 5].any()


def test_a_graph_replays_a_kernel():
    layout = Layout(dtype="bfloat16")
    memory = [torch.zeros(4 * layout.planes(16, 8, 128)[0], dtype=torch.uint8, device="cuda")]
    pages = Pages.of(memory, layout, blocks=4, block_tokens=16, heads=8, head_dim=128)
    rows = torch.ones(4, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(4, device="cuda")
    scatter(pages, slots, rows, rows)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scatter(pages, slots, rows, rows)
    slots += 10
    rows *= 3
    graph.replay()
    assert (pages.planes[1].cells.reshape(64, -1)[10:14] == 3).all()


@pytest.mark.parametrize("kv", ["joined", "split"])
def test_several_layers_move_in_one_launch(kv):
    layout = Layout(dtype="int8", scales="group", kv=kv)
    memory = [
        torch.zeros(12 * size, dtype=torch.uint8, device="cuda")
        for size in layout.planes(16, 8, 64)
    ]
    sizes = {"blocks": 4, "block_tokens": 16, "heads": 8, "head_dim": 64, "layers": 3}
    pages = Pages.of(memory, layout, **sizes, layer=(1, 3))
    rows = torch.randn(2, 2, 40, 8, 64, device="cuda").bfloat16()
    slots = torch.randperm(64, device="cuda")[:40]
    assert not scatter(pages, slots, rows[0], rows[1]).any()
    read = torch.empty_like(rows)
    assert not gather(pages, slots, read[0], read[1]).any()
    assert ((read - rows).abs() <= rows.abs().amax(-1, keepdim=True) / 100).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_pools_convert_on_the_device_as_on_the_host(dtype):
    model = ModelShape(layers=3, kv_heads=2, head_dim=64, dtype="bfloat16")
    small = Layout(dtype=dtype, scales="group")
    host_pool, far = Pool(model, 4, 16), Pool(model, 4, 16, device="cuda")
    host_pool.keys.normal_()
    far.planes[0].copy_(host_pool.planes[0])
    host, pinned = Pool(model, 4, 16, layout=small), Pool(model, 4, 16, layout=small, pinned=True)
    source_slots, target_slots = np.array([4, 0, 9, 7]), np.array([1, 2, 3, 10])
    host.copy_from(host_pool, source_slots, target_slots)
    pinned.copy_from(far, source_slots, target_slots)
    torch.cuda.synchronize()
    assert torch.equal(pinned.planes[0], host.planes[0])
    host_pool.copy_from(host, target_slots, source_slots)
    far.copy_from(pinned, target_slots, source_slots)
    assert torch.equal(far.planes[0].cpu(), host_pool.planes[0])


@pytest.mark.parametrize("way", ["up", "down", "on the card"])
@pytest.mark.parametrize("width", [48, 4096, 65_536])
def test_scattered_rows_cross_the_link(way, width):
    torch.manual_seed(0)
    pinned_rows = torch.randint(0, 256, (600, width), dtype=torch.uint8).pin_memory()
    card = torch.randint(0, 256, (700, width), dtype=torch.uint8, device="cuda")
    source = pinned_rows if way == "up" else card
    target = pinned_rows if way == "down" else card.flip(0) if way == "on the card" else card
    of, to = (torch.randperm(600)[:333].numpy() for _ in range(2))
    wanted = target.cpu().clone()  # of what is on the host, cpu() is no copy
    wanted[to] = source.cpu()[of]
    torch.cuda.synchronize()
    copy_rows(source, of, target, to)
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), wanted)
