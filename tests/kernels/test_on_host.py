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
from onhost import CUDA, NEEDS_GPP, BrokenHostError, Host, pair_of

from kvtrie.kernels import Plane, Rope, twin
from kvtrie.kernels.call import Call
from kvtrie.kernels.formats import CELLS, ROWS

EXAMPLES = settings.default.max_examples  # as the profile says: fast, ci or deep

pytestmark = NEEDS_GPP


@pytest.fixture(scope="module")
def hosts(objects):
    """Hosts by formats and sanitizer, built when first asked for."""
    made = {}

    def host(row, cell, sanitizer="none"):
        key = (row, cell, sanitizer)
        if key not in made:
            made[key] = Host(objects, row, cell, sanitizer=sanitizer)
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


@pytest.mark.grid
@pytest.mark.parametrize("cell", list(CELLS), ids=CELLS.get)
@pytest.mark.parametrize("row", list(ROWS), ids=ROWS.get)
def test_kernels_do_what_twins_do(hosts, row, cell):
    @given(calls(rows=row, cells=cell))
    @settings(max_examples=EXAMPLES // 2)
    def check(made):
        same(made, hosts(*pair_of(made[0])).run)

    check()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("sanitizer", "row", "cell"),
    [
        ("address", torch.bfloat16, torch.float8_e4m3fn),
        ("thread", torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_sanitizers_have_nothing_to_say(hosts, sanitizer, row, cell, kernel):
    @given(calls(kernel=kernel, rows=row, cells=cell))
    @settings(max_examples=EXAMPLES // 5)
    def check(made):
        same(made, hosts(*pair_of(made[0]), sanitizer).run)

    check()


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize(("width", "first"), [(64, 0), (32, 0), (16, 48)])
@pytest.mark.parametrize("kernel", ["rerotate", "scatter_fused_recompute"])
def test_every_pair_of_a_head_turns(hosts, kernel, width, first, neighbours):
    torch.manual_seed(0)
    rope = Rope.of(50, width, theta=100.0, first=first, neighbours=neighbours)
    call = Call(
        kernel,
        (Plane(torch.randn(1, 3, 2, 2, 64).bfloat16()),),
        "none",
        slots=torch.tensor([4, 0, 5]),
        skipped=torch.zeros(3, dtype=torch.uint8),
        rows=() if kernel == "rerotate" else (torch.randn(1, 3, 2, 64).bfloat16(),),
        rotations=torch.tensor([49, 1, -17 if kernel == "rerotate" else 17]),
        rope=rope,
    )
    before = call.planes[0].cells.clone()
    same([call], hosts("bf16", "bf16").run)
    turned = (call.planes[0].cells != before).view(6, 2, 64)
    assert turned[[4, 0, 5], :, first : first + width].float().mean() > 0.9
    assert not turned[[1, 2, 3]].any()


@pytest.mark.parametrize("cell", [torch.float8_e4m3fn, torch.float16, torch.bfloat16], ids=str)
def test_every_code_reads_as_torch_reads_it(hosts, cell):
    word = torch.uint8 if cell.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * cell.itemsize)).to(word).view(cell)
    call = numbers("paged_gather", cell, torch.zeros(len(codes)), codes)
    hosts("fp32", CELLS[cell]).run(call)
    wide = codes.float()
    numeric = ~wide.isnan()
    read = call.rows[0].view(-1)
    assert torch.equal(read.isnan(), wide.isnan())
    assert torch.equal(read[numeric].view(torch.int32), wide[numeric].view(torch.int32))


@pytest.mark.parametrize("cell", [torch.float8_e4m3fn, torch.float16, torch.bfloat16], ids=str)
def test_numbers_round_as_torch_rounds_them(hosts, cell):
    torch.manual_seed(0)
    ordinary = torch.randint(-(2**31), 2**31, (1536,)).to(torch.int32).view(torch.float32)
    halves = torch.arange(255).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([halves[1:] + halves[:-1], torch.randn(258)]) / 2
    extreme = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 448, 449, 65504, 65519, 65520])
    x = torch.cat([ordinary, ties, extreme])
    x = torch.nn.functional.pad(x, (0, 2560 - len(x)))
    call = numbers("paged_scatter", cell, x, torch.zeros(len(x), dtype=cell))
    hosts("fp32", CELLS[cell]).run(call)
    nearest = (x.clamp(-448, 448) if cell.itemsize == 1 else x).to(cell)
    word = torch.uint8 if cell.itemsize == 1 else torch.int16
    wrote = call.planes[0].cells.reshape(-1)
    assert torch.equal(wrote.float().isnan(), x.isnan())
    assert torch.equal(wrote.view(word)[~x.isnan()], nearest.view(word)[~x.isnan()])


def numbers(kernel, cell, x, codes):
    """A call over all of `x`, one head of 64 numbers per token, at scale 1."""
    covers = "tensor" if cell.itemsize == 1 else "none"
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, -len(codes) % 64 * cell.itemsize))
    cells = padded.view(cell).view(1, -1, 1, 1, 64)
    plane = Plane(cells, torch.ones(1).expand(cells.shape[:-1]) if covers == "tensor" else None)
    rows = x.view(1, -1, 1, 64)
    slots, skipped = torch.arange(rows.shape[1]), torch.zeros(rows.shape[1], dtype=torch.uint8)
    return Call(kernel, (plane,), covers, slots, skipped, (rows,), slots.new_empty(0))


def test_a_step_beyond_a_buffer_is_seen(tmp_path):
    text = "const bool inside = 0 <= slot && slot < capacity;"
    other = text.replace("&&", "||")
    host = mutated(tmp_path, "paged_gather.cu", text, other, "address")
    slots = torch.tensor([0, 10_000])
    with pytest.raises(BrokenHostError, match=r"AddressSanitizer(.|\n)*paged\.cuh"):
        host.run(plain("paged_gather", slots))


def test_a_missing_barrier_is_seen(tmp_path):
    text = "        __syncthreads();\n        if (place"
    host = mutated(tmp_path, "paged.cuh", text, "        if (place", "thread")
    with pytest.raises(BrokenHostError, match=r"data race(.|\n)*paged\.cuh"):
        host.run(plain("scatter_fused_recompute", torch.arange(4), deviation=torch.zeros(1, 4)))


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
    planes = (Plane(torch.randn(1, 2, 4, 2, 16)),)
    rows, skipped = torch.randn(1, len(slots), 2, 16), torch.zeros(len(slots), dtype=torch.uint8)
    return Call(kernel, planes, "none", slots, skipped, (rows,), slots.new_empty(0), **more)
