"""Every kernel becomes machine code for every architecture on a machine without a GPU."""

from __future__ import annotations

import ctypes
import io
import itertools
import re
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

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
    for kernel, (row, cell) in itertools.product(KERNELS, sorted(pairs)):
        report = io.StringIO()
        code = compiled(kernel, arch, row, cell, logs=report).code
        assert code[:4] == b"\x7fELF"
        assert f"for '{arch}" in report.getvalue()
        assert "warning" not in report.getvalue()
        assert SPILLS.findall(report.getvalue()) == [("0", "0")]
        assert int(USED.search(report.getvalue())[1]) <= 64  # a block of 1024 threads starts


def test_a_second_compilation_comes_from_the_cache(tmp_path):
    first = compiled("rerotate", "sm_90", "bf16", "bf16", cache=tmp_path).code
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    [entry] = [file for file in files if file.read_bytes() == first]
    entry.write_bytes(first[::-1])
    assert compiled("rerotate", "sm_90", "bf16", "bf16", cache=tmp_path).code == first[::-1]
    assert compiled("rerotate", "sm_90", "bf16", "fp16", cache=tmp_path).code[:4] == b"\x7fELF"


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_and_cells_move_in_sixteen_bytes(kernel):
    ptx = _ptx(cubin.text(kernel), "bf16", "bf16")
    moved = re.findall(r"((?:ld|st)\.global\S*)\s", ptx)
    wide = [each for each in moved if each.endswith(("v4.u32", "v4.b32"))]
    assert sum(each.startswith("ld") for each in wide) >= 2
    assert sum(each.startswith("st") for each in wide) >= 2
    assert not [each for each in moved if each.endswith(("16", "f16x2"))]


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


def _ptx(text, row, cell):
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [
        b"-arch=compute_90",
        b"-std=c++17",
        f"-DROW={row}".encode(),
        f"-DCELL={cell}".encode(),
    ]
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode()
