"""Copies between host and device on a separate stream, compared with the link's speed.

The link is what one pinned copy of everything reaches. Blocks are scattered on both sides: as
whole blocks, as single layers (a call each, or all blocks of a layer by one kernel), in one batch
of the driver, or packed on the device by a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from benches.gpu.clock import Row
from kvtrie import ModelShape
from kvtrie.kernels import Pages, gather, scatter
from kvtrie.kernels.cubin import core
from kvtrie.tiers import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benches.gpu.clock import Clock

GOAL = 0.9
LAYERS, HEADS, DIM, TOKENS = 32, 8, 128, 16


def measure(clock: Clock, blocks: int) -> Iterator[Row]:
    """Both directions, over `blocks` blocks of a model of 32 layers."""
    model = ModelShape(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")
    host_pool = Pool(model, blocks, TOKENS, pinned=clock.cuda)
    device_pool = Pool(model, blocks, TOKENS, device=clock.device)
    yield from _one_way(clock, "to the device", host_pool, device_pool)
    yield from _one_way(clock, "to the host", device_pool, host_pool)
    yield _both_ways(clock, host_pool, device_pool)
    if clock.cuda:  # the driver's own call, which a CPU does not have
        yield _batched(clock, "to the device", host_pool, device_pool)
        yield _batched(clock, "to the host", device_pool, host_pool)


def _one_way(clock: Clock, way: str, source: Pool, target: Pool) -> Iterator[Row]:
    (of,), (to,) = source.planes, target.planes
    size = of.numel()
    on_stream = _on(clock, clock.stream())
    link = clock.seconds(on_stream(lambda: to.copy_(of, non_blocking=True)), graph=False)
    yield Row(f"link, {way}", size / link / 1e9, "GB/s")
    slots = torch.randperm(source.blocks).tolist()
    ways = (("whole blocks", LAYERS, GOAL), ("single layers, a call each", 1, None))
    for what, count, goal in ways:
        pairs = [
            (source.units(slot, at, at + count), target.units(slots[-1 - slot], at, at + count))
            for slot in slots
            for at in range(0, LAYERS, count)
        ]

        def copy(pairs=pairs) -> None:
            for one, other in pairs:
                target.copy_from(source, one, other)

        seconds = clock.seconds(on_stream(copy), graph=False)
        yield Row(f"{what}, {way}", size / seconds / 1e9, "GB/s", "link", link / seconds, goal)
    order = np.array(slots)

    def layers() -> None:
        for layer in range(LAYERS):
            of_units, to_units = (
                source.layer_units(order, layer),
                target.layer_units(order[::-1], layer),
            )
            target.copy_from(source, of_units, to_units)

    seconds = clock.seconds(on_stream(layers), graph=False)
    what = f"single layers by a kernel, {way}"
    yield Row(what, size / seconds / 1e9, "GB/s", "link", link / seconds, GOAL)
    packed = _packed(clock, source, target)
    seconds = clock.seconds(on_stream(packed), graph=False)
    what = f"layers packed by a kernel, {way}"
    yield Row(what, size / seconds / 1e9, "GB/s", "link", link / seconds, GOAL)


def _on(clock: Clock, stream: torch.cuda.Stream | None):
    """Puts work on a stream that begins and ends with the current one."""

    def on_stream(work):
        def run() -> None:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(clock.device))
            with clock.on(stream):
                work()
            if stream is not None:
                torch.cuda.current_stream(clock.device).wait_stream(stream)

        return run

    return on_stream


def _batched(clock: Clock, way: str, source: Pool, target: Pool) -> Row:
    """Every layer of every block, in one call of the driver."""
    cuda, stream = core(), torch.cuda.Stream(clock.device)
    (of,), (to,) = source.planes, target.planes
    order = torch.randperm(len(of)).tolist()

    def buffers(memory: torch.Tensor, units: list[int]):
        size = memory.shape[1]
        return [cuda.Buffer.from_handle(memory[at].data_ptr(), size) for at in units]

    sources, targets = buffers(of, order), buffers(to, order[::-1])
    through = cuda.Stream.from_handle(stream.cuda_stream)
    on_stream = _on(clock, stream)
    link = clock.seconds(on_stream(lambda: to.copy_(of, non_blocking=True)), graph=False)
    batch = on_stream(lambda: cuda.utils.copy_batch(through, sources, targets))
    seconds = clock.seconds(batch, graph=False)
    rate = of.numel() / seconds / 1e9
    return Row(f"layers in one batch, {way}", rate, "GB/s", "link", link / seconds)


def _packed(clock: Clock, source: Pool, target: Pool):
    """Layer by layer: scattered tokens on the device, one contiguous piece on the host."""
    device = target if target.device.type == clock.device.type else source
    host = source if device is target else target
    blocks, tokens = device.blocks, device.blocks * TOKENS
    sizes = {"blocks": blocks, "block_tokens": TOKENS, "heads": HEADS, "head_dim": DIM}
    pages = [
        Pages.of(device.planes, device.layout, **sizes, layers=LAYERS, layer=layer)
        for layer in range(LAYERS)
    ]
    staging = torch.empty((2, 2, tokens, HEADS, DIM), dtype=torch.bfloat16, device=clock.device)
    pieces = host.planes[0].view(LAYERS, -1).view(torch.bfloat16).view(LAYERS, *staging[0].shape)
    order = torch.randperm(blocks, device=clock.device)[:, None] * TOKENS
    slots = (order + torch.arange(TOKENS, device=clock.device)).view(-1)

    def run() -> None:
        for layer in range(LAYERS):
            rows = staging[layer % 2]
            if device is target:
                rows.copy_(pieces[layer], non_blocking=True)
                scatter(pages[layer], slots, rows[0], rows[1])
            else:
                gather(pages[layer], slots, rows[0], rows[1])
                pieces[layer].copy_(rows, non_blocking=True)

    return run


def _both_ways(clock: Clock, host_pool: Pool, device_pool: Pool) -> Row:
    half = host_pool.planes[0].shape[0] // 2
    up, down = clock.stream(), clock.stream()
    pairs = [
        (up, device_pool.planes[0][:half], host_pool.planes[0][:half]),
        (down, host_pool.planes[0][half:], device_pool.planes[0][half:]),
    ]

    def run() -> None:
        for stream, to, of in pairs:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(clock.device))
            with clock.on(stream):
                to.copy_(of, non_blocking=True)
        for stream, _, _ in pairs:
            if stream is not None:
                torch.cuda.current_stream(clock.device).wait_stream(stream)

    seconds = clock.seconds(run, graph=False)
    return Row("both ways at once", host_pool.planes[0].numel() / seconds / 1e9, "GB/s")
