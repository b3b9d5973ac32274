"""Shared code of the attention kernels' tests: drawn inputs, and a look at their machine code."""

from __future__ import annotations

import io
import re

import torch
from hypothesis import strategies as st

from kvtrie.kernels import ARCHS, compiled
from kvtrie.kernels.formats import ROWS

USED = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")


@st.composite
def asked(draw, dtype, dims):
    """Queries, rows in any order and their positions; strides as of slices of larger tensors."""
    dim, each, groups = (
        draw(st.sampled_from(dims)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
    )
    batch, new, rows = draw(st.integers(1, 2)), draw(st.integers(1, 40)), draw(st.integers(1, 70))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    query = torch.randn(batch, new, groups * each, dim).to(dtype).transpose(1, 2) * 2
    keys, values = (torch.randn(batch, groups, rows + 3, dim).to(dtype) for _ in range(2))
    pos = torch.stack([torch.randperm(rows + 9)[:rows] + 1 for _ in range(batch * groups)])
    place = {"token_pos": pos.view(batch, groups, rows), "input_pos": draw(st.integers(0, rows))}
    pos[:, draw(st.integers(0, rows - 1))] = 0  # without padding every query sees one
    padded = draw(st.booleans())
    place["first"] = torch.randint(0, rows + 4, (batch,)) if padded else None
    return (query, keys[:, :, :rows], values[:, :, :rows]), place


def drawn(arch):
    """A format and a width for an architecture: each format is that of two."""
    at = ARCHS.index(arch)
    return list(ROWS)[at % 3], (64, 128, 256)[(at + at // 3) % 3]


def built(kernel, arch, row, width):
    """Compile a kernel of attention, and see that its machine code is in order."""
    report = io.StringIO()
    code = compiled(kernel, arch, row, row, width=width, logs=report).code
    said = report.getvalue()
    assert code[:4] == b"\x7fELF"
    assert f"for '{arch}" in said
    assert "warning" not in said
    assert SPILLS.findall(said) == [("0", "0")]
    assert int(USED.search(said)[1]) <= 255
