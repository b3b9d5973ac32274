"""Copies that start at least 50 ms late on a CUDA device: no step reads or writes before them."""

import pytest
import torch
from tests.engines.step_rig import LAYERS, StepRig

from kvtrie.engines.vllm.step_copies import StepCopies
from kvtrie.transfer.copy_stream import CopyStream

pytestmark = pytest.mark.gpu

LATE = 1 << 27
"""Cycles before a copy: 64 ms at 2.1 GHz, and more at a lower clock."""

STORED, LOADED = slice(1, 5), slice(5, 9)


class LateStream(CopyStream):
    """A stream on which each group of copies starts late."""

    def copying(self):
        with super().copying():
            torch.cuda._sleep(LATE)
        return super().copying()


class Unordered(LateStream):
    """A late stream whose copies the computation does not wait for."""

    def hold(self, event):
        pass


def make_copies(stream):
    rig = StepRig("cuda")
    device = rig.tensors[0].device
    copies = StepCopies(rig.gpu, rig.host, stream(device), stream(device), [range(LAYERS)])
    copies.begin([])
    return rig, copies


def compute(rig, layer):
    """Write a layer of the four stored blocks, and return what was written."""
    made = torch.randn_like(rig.tensors[layer][STORED])
    rig.tensors[layer][STORED] = made
    return made


def read_back(stream):
    """Store four blocks, load them into other slots layer by layer; pairs of written and read."""
    rig, copies = make_copies(stream)
    written = [compute(rig, layer) for layer in range(LAYERS)]
    copies.store(rig.stores)
    copies.drain()
    copies.begin([])
    copies.load(rig.loads)
    copies.start_loads()
    read = []
    for layer in range(LAYERS):
        copies.wait_for_layer(layer)
        read.append(rig.tensors[layer][LOADED].clone())
    copies.finish()
    torch.cuda.synchronize()
    return list(zip(written, read, strict=True))


def overwritten(stream):
    """Store layer by layer, then write over the stored blocks; pairs of written and stored."""
    rig, copies = make_copies(stream)
    written = []
    copies.store_ahead(rig.stores)
    copies.start_loads()
    for layer in range(LAYERS):
        copies.wait_for_layer(layer)
        written.append(compute(rig, layer))
        copies.save_layer(layer)
    copies.finish()
    copies.await_stores()
    for tensor in rig.tensors:
        tensor[STORED] = 0
    torch.cuda.synchronize()
    copies.begin([])
    copies.load(rig.loads)
    copies.finish()
    copies.drain()
    read = [tensor[LOADED].clone() for tensor in rig.tensors]
    torch.cuda.synchronize()
    return list(zip(written, read, strict=True))


@pytest.mark.parametrize("play", [read_back, overwritten])
def test_a_step_waits_for_late_copies(play):
    assert all(torch.equal(*pair) for pair in play(LateStream))


@pytest.mark.parametrize("play", [read_back, overwritten])
def test_a_missing_wait_is_found(play):
    assert not all(torch.equal(*pair) for pair in play(Unordered))


def test_copies_are_late():
    rig, copies = make_copies(LateStream)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    copies.store(rig.stores)
    copies.await_stores()
    ended.record()
    torch.cuda.synchronize()
    assert begun.elapsed_time(ended) >= 50
