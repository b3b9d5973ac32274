"""Every kernel becomes machine code for every architecture on a machine without a GPU."""

from __future__ import annotations

import ctypes
import io
import itertools
import re
import struct
from collections import Counter
from pathlib import Path

import pytest

from kvtrie._kvtrie import KERNELS as TEXTS
from kvtrie.errors import ConfigError
from kvtrie.kernels import ARCHS, compiled, cubin
from kvtrie.kernels.formats import CELLS, ROWS

KERNELS = ("paged_gather", "paged_scatter", "rerotate", "scatter_fused_recompute")
PAIRS = list(itertools.product(ROWS.values(), CELLS.values()))
USED = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_a_gpu(arch):
    # All pairs of formats over all architectures, and the one whose code depends on it on each.
    pairs = {("bf16", "fp8"), *PAIRS[ARCHS.index(arch) :: len(ARCHS)]}
    kernels = [("paged_copy", ("fp32", "fp32")), *itertools.product(KERNELS, sorted(pairs))]
    for kernel, (row, cell) in kernels:
        report = io.StringIO()
        code = compiled(kernel, arch, row, cell, logs=report).code
        assert code[:4] == b"\x7fELF"
        assert f"for '{arch}" in report.getvalue()
        assert "warning" not in report.getvalue()
        assert SPILLS.findall(report.getvalue()) == [("0", "0")]
        assert int(USED.search(report.getvalue())[1]) <= 64  # a block of 1024 threads starts
        moved = traffic(code, kernel)
        if kernel == "paged_copy":
            assert (moved["load 16"], moved["store 16"]) == (4, 4)  # all four under way together
            continue
        wanted = vectors(row, cell, kernel)
        if kernel in {"paged_gather", "paged_scatter"}:
            assert moved == wanted
            continue
        stores = {each: count for each, count in moved.items() if each.startswith("store")}
        assert stores == {each: n for each, n in wanted.items() if each.startswith("store")}
        if kernel == "scatter_fused_recompute":
            assert moved["load 16"] >= wanted["load 16"]


def test_a_second_compilation_comes_from_the_cache(tmp_path):
    first = compiled("rerotate", "sm_90", "bf16", "bf16", cache=tmp_path).code
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    [entry] = [file for file in files if file.read_bytes().endswith(first)]
    kept, stamp = entry.read_bytes(), entry.stat().st_mtime_ns
    assert compiled("rerotate", "sm_90", "bf16", "bf16", cache=tmp_path).code == first
    assert entry.stat().st_mtime_ns == stamp  # taken, not made again
    flipped = bytearray(kept)
    flipped[len(kept) // 2] ^= 1
    foreign = compiled("paged_gather", "sm_80", "fp32", "fp32", cache=tmp_path).code
    for wrong in (bytes(flipped), kept[:-7], b"", first, foreign):
        entry.write_bytes(wrong)
        assert compiled("rerotate", "sm_90", "bf16", "bf16", cache=tmp_path).code == first
        assert entry.read_bytes() == kept  # compiled again
    assert compiled("rerotate", "sm_90", "bf16", "fp16", cache=tmp_path).code[:4] == b"\x7fELF"


def test_without_a_folder_to_write_to_kernels_are_compiled_all_the_same(tmp_path):
    (tmp_path / "file").write_text("in the way")
    code = compiled("paged_gather", "sm_90", "bf16", "bf16", cache=tmp_path / "file").code
    assert code[:4] == b"\x7fELF"


def test_the_extension_carries_every_file():
    folder = Path(__file__).parent.parent.parent / "cuda"
    assert {file.name: file.read_text() for file in folder.iterdir()} == TEXTS


def test_errors_name_the_file_and_line():
    lines = cubin.text("paged_gather").splitlines()
    at = next(
        n
        for n, line in enumerate(lines)
        if line.startswith("#line") and "paged_gather" in line and n
    )
    number = int(lines[at].split()[1])
    assert TEXTS["paged_gather.cu"].splitlines()[number - 1 :] == lines[at + 1 :]


def test_without_a_driver_nothing_hangs():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(ConfigError, match="no CUDA driver"):
            cubin.loaded("paged_gather", "sm_90", "bf16", "bf16")
    else:
        pytest.skip("a CUDA driver is here: loading is not refused")


def vectors(row, cell, kernel):
    """Accesses to global memory that a thread needs, by their bytes.

    Two vectors of 16 bytes of a row and as many numbers of a cell; also a slot, the flag, and a
    scale if cells are codes.
    """
    sizes = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
    quantised = sizes[cell] == 1
    wide = 16 // sizes[row] * sizes[cell]
    cells = Counter({min(wide, 16): 2 * max(1, wide // 16)})
    rows = Counter({16: 2})
    reads, writes = (cells, rows) if kernel == "paged_gather" else (rows, cells)
    found = Counter({f"load {size}": count for size, count in reads.items()})
    found += Counter({f"store {size}": count for size, count in writes.items()})
    found += Counter({"load 8": 1, "store 1": 1})
    if quantised:
        found["load 4"] += 1
        found["store 4"] += kernel != "paged_gather"
    if kernel == "scatter_fused_recompute":
        found["store 4"] += 1  # the deviation
    return +found


def traffic(code, kernel):
    """Loads and stores of global memory in a cubin's machine code, by their bytes.

    An instruction has 16 bytes since sm_70: its low 12 bits say what it is (LDG 0x981, STG 0x986)
    and bits 73 to 75 how wide; nvdisasm reads the same.
    """
    start = struct.unpack_from("<Q", code, 40)[0]
    count, names = struct.unpack_from("<HH", code, 60)
    heads = [struct.unpack_from("<IIQQQQIIQQ", code, start + at * 64) for at in range(count)]
    [text] = [
        code[head[4] : head[4] + head[5]]
        for head in heads
        if code[heads[names][4] + head[0] :].startswith(f".text.{kernel}\0".encode())
    ]
    kinds, sizes = {0x981: "load", 0x986: "store"}, (1, 1, 2, 2, 4, 8, 16, 16)
    return Counter(
        f"{kinds[low & 0xFFF]} {sizes[high >> 9 & 7]}"
        for low, high in struct.iter_unpack("<QQ", text)
        if low & 0xFFF in kinds
    )
