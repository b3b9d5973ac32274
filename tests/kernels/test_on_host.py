"""The kernels' own source, compiled for the host, against the torch twins: the same bits.

Under AddressSanitizer (with undefined behaviour) and ThreadSanitizer too: buffers end where
tensors do, and a CUDA thread is a thread.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import KERNELS, calls, copied, written
from hypothesis import given, settings
from onhost import CUDA, Broken, Host, pair_of

from kvtrie.kernels import Plane, twin
from kvtrie.kernels.call import Call
from kvtrie.kernels.formats import CELLS, ROWS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Hosts by formats and sanitizer, built when first asked for."""
    folder, made = tmp_path_factory.mktemp("kernels"), {}

    def host(row, cell, sanitizer="none"):
        key = (row, cell, sanitizer)
        if key not in made:
            made[key] = Host(folder, row, cell, sanitizer=sanitizer)
        return made[key]

    yield host
    for each in made.values():
        each.close()


def same(made, run):
    """Do the calls both ways and compare all that was or was not written."""
    theirs = copied(made)
    for call, other in zip(made, theirs, strict=True):
        run(call)
        twin.run(other)
        for mine, its in zip(written(call), written(other), strict=True):
            assert torch.equal(mine, its)
        if call.deviation is not None:
            torch.testing.assert_close(call.deviation, other.deviation, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cell", list(CELLS), ids=CELLS.get)
@pytest.mark.parametrize("row", list(ROWS), ids=ROWS.get)
def test_kernels_do_what_twins_do(hosts, row, cell):
    @given(calls(rows=row, cells=cell))
    @settings(max_examples=12)
    def check(made):
        same(made, hosts(*pair_of(made[0])).run)

    check()


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize(
    ("row", "cell"), [(torch.bfloat16, torch.float8_e4m3fn), (torch.float32, torch.float32)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_sanitizers_have_nothing_to_say(hosts, sanitizer, row, cell, kernel):
    @given(calls(kernel=kernel, rows=row, cells=cell))
    @settings(max_examples=5)
    def check(made):
        same(made, hosts(*pair_of(made[0]), sanitizer).run)

    check()


def test_a_step_beyond_a_buffer_is_seen(tmp_path):
    text = "const bool inside = 0 <= slot && slot < capacity;"
    host = mutated(
        tmp_path, "paged_gather.cu", text, "const bool inside = 0 <= slot || slot < capacity;", "address"
    )
    slots = torch.tensor([0, 10_000])
    with pytest.raises(Broken, match=r"AddressSanitizer(.|\n)*paged\.cuh"):
        host.run(plain("paged_gather", slots))


def test_a_missing_barrier_is_seen(tmp_path):
    text = "        __syncthreads();\n        if (place"
    host = mutated(tmp_path, "paged.cuh", text, "        if (place", "thread")
    with pytest.raises(Broken, match=r"data race(.|\n)*paged\.cuh"):
        host.run(plain("scatter_fused_recompute", torch.arange(4), deviation=torch.zeros(4)))


def mutated(folder, file, text, other, sanitizer):
    """A host whose kernels have `other` where the source says `text`."""
    sources = folder / "cuda"
    shutil.copytree(CUDA, sources)
    before = (sources / file).read_text()
    assert text in before
    (sources / file).write_text(before.replace(text, other))
    return Host(folder, "fp32", "fp32", sanitizer=sanitizer, cuda=sources)


def plain(kernel, slots, **more):
    """A call over two blocks of four tokens, two heads of 16 numbers."""
    plane = Plane(torch.randn(2, 4, 2, 16))
    rows, skipped = torch.randn(len(slots), 2, 16), torch.zeros(len(slots), dtype=torch.uint8)
    return Call(kernel, plane, "none", slots, skipped, rows, slots.new_empty(0), **more)
