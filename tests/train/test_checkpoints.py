"""Checkpoints in host memory: what comes back, whose memory it is, and when it is copied."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import drawn, grads, make, worst

from kvtrie.selective import CacheSettings
from kvtrie.selective.quantiser import Codes, dequantise, quantise
from kvtrie.train import GradientSettings, LongContextGradients, make_head
from kvtrie.train.checkpoint import Checkpoint, block_of
from kvtrie.train.gradients import _Batch
from kvtrie.train.host_pool import HostPool
from kvtrie.train.spill import Spill

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALL = ("put", "bring", "read", "free", "reset")


@settings(max_examples=settings.default.max_examples // 4, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ALL), st.integers(0, 9)), max_size=60))
def test_what_comes_back_is_what_was_put(operations):
    pool, held = HostPool(DEVICE), []
    most = {}
    for number, (what, at) in enumerate(operations):
        if what == "put":
            x = torch.full((1, 3 + at % 3), float(number), device=DEVICE)
            held.append((Checkpoint(x, pool), x.clone()))
            alike = [one.nbytes for _, one in held].count(x.nbytes)
            most[x.nbytes] = max(most.get(x.nbytes, 0), alike)
        elif what == "reset":
            pool.reset()
            held, most = [], {}
        elif held:
            kept, x = held[at % len(held)]
            if what == "bring":
                kept.bring()
            elif what == "read":
                assert torch.equal(kept.read(), x)
            else:
                kept.free()
                del held[at % len(held)]
        if not any(done == "reset" for done, _ in operations):
            # As many buffers of a size as were ever in use at a time.
            assert pool.nbytes == sum(size * count for size, count in most.items())
    for kept, x in held:
        assert torch.equal(kept.read(), x)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_those_of_the_quantiser(bits):
    torch.manual_seed(bits)
    x = torch.randn(2, 3, 64, device=DEVICE)
    kept = Checkpoint(x, HostPool(DEVICE), f"torch-quantized{bits}")
    parts = quantise(x.unflatten(-1, (-1, block_of(64))), bits)[:3]
    truth = dequantise(Codes._make((*parts, bits)), x.dtype).view(x.shape)
    assert torch.equal(kept.read(), truth)
    assert kept.nbytes == sum(each.nbytes for each in parts)


def test_memory_is_pinned_where_there_is_a_gpu():
    kept = HostPool(DEVICE).put(torch.ones(5, device=DEVICE))
    assert kept.host.device.type == "cpu"
    assert kept.host.is_pinned() == (DEVICE.type == "cuda")


def test_copies_run_beside_the_caller():
    """While the stream is held up a put returns; only a read waits."""
    pool, go = HostPool(DEVICE), threading.Event()
    pool.outwards.submit(go.wait)
    x = torch.arange(6.0, device=DEVICE)
    kept = Checkpoint(x, pool)
    kept.bring()
    assert not kept._parts[0].copied.passed
    go.set()
    assert torch.equal(kept.read(), x)


def test_what_waits_to_be_copied_does_not_pile_up():
    pool = HostPool(DEVICE)
    held = [pool.put(torch.full((7,), float(n), device=DEVICE)) for n in range(50)]
    assert sum(not each.copied.passed for each in held) <= 8


def test_a_copy_that_fails_is_told_to_the_reader(tmp_path, monkeypatch):
    spill, pool = Spill(str(tmp_path), [100]), HostPool(DEVICE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spill, "put", full)
    kept = Checkpoint(torch.ones(9, device=DEVICE), pool, None, spill)
    with pytest.raises(OSError, match="No space left"):
        kept.read()
    pool.reset()
    spill.close()


def test_files_hold_what_was_put(tmp_path):
    spill, pool = Spill(str(tmp_path), [400, 600_000]), HostPool(DEVICE)
    given_ = [torch.randn(10, 10, device=DEVICE), torch.randn(150_000, device=DEVICE)]
    kept = [Checkpoint(x, pool, None, spill) for x in given_]
    assert [each.nbytes for each in kept] == [0, 0]
    for each, x in zip(kept, given_, strict=True):
        assert torch.equal(each.read(), x)
        assert torch.equal(each.read(), x)  # a second time
    spill.close()


def test_a_cell_computes_while_its_neighbours_checkpoints_come():
    model = make()
    tool = LongContextGradients(
        model, make_head("next_token_prediction", model), CacheSettings("h2o-default", 14, 5)
    )
    ids = drawn(3, total=60)
    told = []

    def noted(name):
        real = getattr(_Batch, name)

        def note(batch, layers, *more):
            column = next(each for each in more if isinstance(each, range))
            told.append((name, layers.start, column.start))
            return real(batch, layers, *more)

        return note

    def run_cell(batch, layers, cells, column, seeds, real=_Batch._run_cell):
        told.append(("_run_cell", layers.start, column.start))
        return real(batch, layers, cells, column, seeds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Batch, "_bring", noted("_bring"))
        patch.setattr(_Batch, "_run_cell", run_cell)
        tool.gradients(ids, ids[:, -20:])
    cells = [(layer, at) for name, layer, at in told if name == "_run_cell"]
    assert len(cells) > 6
    for cell, following in itertools.pairwise(cells):
        if cell[0] == following[0]:  # the one to the left is asked for before this one runs
            assert ("_bring", *following) in told[: told.index(("_run_cell", *cell))]


def test_memory_stays_that_of_a_batch():
    model = make()
    cache = CacheSettings("h2o-default", 14, 5, randomize_chunk_sizes=True)
    tool = LongContextGradients(model, make_head("next_token_prediction", model), cache)
    sizes, draw = [], random.Random(0)
    for _ in range(8):
        ids = drawn(3, total=draw.randint(50, 60))
        tool.gradients(ids, ids[:, -20:])
        sizes.append(tool.pool(torch.device("cpu")).nbytes)
    assert max(sizes) < 2 * min(sizes)


def test_an_error_in_a_batch_leaves_the_next_one_in_order():
    model = make()
    tool = LongContextGradients(
        model, make_head("next_token_prediction", model), CacheSettings("h2o-default", 14, 5),
        GradientSettings(1, 1.0),
    )  # fmt: skip
    ids = drawn(3, total=60)
    tool.gradients(ids, ids[:, -20:])
    truth = grads(model)
    real, calls = _Batch._run_cell, []

    def fails(*given_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Batch, "_run_cell", fails)
        with pytest.raises(KeyboardInterrupt):
            tool.gradients(ids, ids[:, -20:])
    grads(model)
    tool.gradients(ids, ids[:, -20:])
    assert worst(grads(model), truth) == 0.0
