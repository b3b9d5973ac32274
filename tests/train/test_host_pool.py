"""Host memory of checkpoints: reads return the written numbers, and copies run in order."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrie.selective.quantiser import Codes, dequantise, quantise
from kvtrie.train.checkpoint import Checkpoint, block_of
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
