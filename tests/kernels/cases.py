"""Random calls: every kernel, format, layout and scale, with slots and positions that do not exist.

Small enough for a loop over single numbers and for a thread per CUDA thread.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from hypothesis import strategies as st

from kvtrie.kernels.call import Call
from kvtrie.kernels.formats import CELLS, LARGEST, ROWS
from kvtrie.kernels.launch import step_format
from kvtrie.kernels.pages import Pages
from kvtrie.kernels.rope import Rope
from kvtrie.layout import Layout

KERNELS = ("paged_gather", "paged_scatter", "rerotate", "scatter_fused_recompute")
FAR = (-1, -(2**40), 2**31, 2**40, 2**62)


@st.composite
def calls(draw, kernel=None, rows=None, cells=None):
    """One call per plane, over memory of their own; several are K and V of the same tokens."""
    kernel = kernel or draw(st.sampled_from(KERNELS))
    cell = cells or draw(st.sampled_from(list(CELLS)))
    row = rows or draw(st.sampled_from(list(ROWS)))
    step = 16 // (step_format(cell) if kernel == "rerotate" else row).itemsize
    torch.manual_seed(draw(st.integers(0, 2**16)))
    pages = draw(_pages(cell, step))
    tokens = draw(st.integers(1, 9))
    capacity = pages.planes[0].capacity
    slots = draw(_indices(tokens, range(capacity), distinct=True))
    skipped = torch.full((tokens,), 7, dtype=torch.uint8)
    nothing = torch.empty(0, dtype=torch.int64)
    made = []
    for plane in pages.planes:
        fresh = _rows(draw, (tokens, *plane.cells.shape[2:]), row, pages.covers)
        fresh = torch.empty(0, dtype=cell) if kernel == "rerotate" else fresh
        made.append(Call(kernel, plane, pages.covers, slots, skipped, fresh, nothing))
    if kernel == "rerotate":
        made = made[:1]
    if kernel == "scatter_fused_recompute" and draw(st.booleans()):
        made = [replace(call, deviation=torch.full((tokens,), -1.0)) for call in made]
    if kernel == "rerotate" or (kernel == "scatter_fused_recompute" and draw(st.booleans())):
        rope = draw(_ropes(pages.planes[0].cells.shape[3], step))
        least = 1 - rope.length if kernel == "rerotate" else 0
        turns = draw(_indices(tokens, range(least, rope.length), distinct=False))
        made[0] = replace(made[0], rope=rope, turns=turns)
    return made


@st.composite
def _pages(draw, cell, step):
    heads, dim = draw(st.integers(1, 3)), 2 * step * draw(st.integers(1, 3))
    latent = draw(st.booleans())
    split = not latent and draw(st.booleans())
    v_head_dim = 2 * step if split else None
    inner = draw(st.permutations(["kv", "token", "head"]))
    order = draw(
        st.sampled_from(
            [
                ("block", "layer", *inner, "dim"),
                ("layer", "block", *inner, "dim"),
                ("layer", "kv", "block", "token", "head", "dim"),
                ("kv", "block", "token", "layer", "head", "dim"),
            ]
        )
    )
    layout = Layout(
        order=order,
        dtype=str(cell).removeprefix("torch."),
        kv="split" if split else "joined",
        scales=draw(st.sampled_from(["tensor", "head", "token", "group"]))
        if cell in LARGEST
        else "none",
        latent=latent,
        alignment=draw(st.sampled_from([1, 64])) if "kv" not in order[:2] else 1,
    )
    if "kv" in order[:2] or order[3] == "layer":
        layout = replace(layout, alignment=1)
    layers, blocks = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    block_tokens = draw(st.integers(1, 7))
    sizes = layout.planes(block_tokens, heads, dim, v_head_dim)
    planes = 1 if latent else 2
    by = {
        "none": None,
        "tensor": (1,),
        "head": (heads,),
        "token": (blocks * block_tokens,),
        "group": (blocks * block_tokens, heads),
    }[layout.scales]
    return Pages.of(
        [_memory(blocks * layers * size, cell) for size in sizes],
        layout,
        blocks=blocks,
        block_tokens=block_tokens,
        heads=heads,
        head_dim=dim,
        v_head_dim=v_head_dim,
        layers=layers,
        layer=draw(st.integers(0, layers - 1)),
        scales=[torch.rand(by) + 0.01 for _ in range(planes)] if by else (),
    )


@st.composite
def _ropes(draw, dim, step):
    width = 2 * step * draw(st.integers(1, dim // (2 * step)))
    return Rope.of(
        draw(st.integers(2, 40)),
        width,
        theta=draw(st.sampled_from([100.0, 10_000.0])),
        first=draw(st.sampled_from([0, dim - width])),
        neighbours=draw(st.booleans()),
    )


@st.composite
def _indices(draw, tokens, inside, *, distinct):
    """Mostly some of `inside`, with others that are nowhere near it in between."""
    most = min(tokens, len(inside)) if distinct else tokens
    found = draw(
        st.lists(st.sampled_from(inside), min_size=most - most // 3, max_size=most, unique=distinct)
    )
    far = draw(
        st.lists(
            st.sampled_from([*FAR, inside.stop, inside.start - 1]),
            min_size=tokens - len(found),
            max_size=tokens - len(found),
        )
    )
    return torch.tensor(draw(st.permutations(found + far)), dtype=torch.int64)


def _memory(size, cell):
    """A pool's bytes: numbers of ordinary size in every place."""
    if cell in LARGEST:
        codes = torch.randint(0, 0x7F, (size,)) + 128 * torch.randint(0, 2, (size,))
        return codes.to(torch.uint8).clone()
    return torch.randn(size // cell.itemsize).to(cell).view(torch.uint8)


def _rows(draw, shape, row, covers):
    """Rows, side by side or head by head, some of them all zeros."""
    tokens, heads, dim = shape
    rows = torch.randn(shape) * draw(st.sampled_from([1e-3, 1.0, 300.0]))
    if covers in {"token", "group"} and draw(st.booleans()):
        rows[0] = 0.0
    rows = rows.to(row)
    form = draw(st.sampled_from(["dense", "heads first", "with others"]))
    if form == "heads first":
        return rows.transpose(0, 1).contiguous().transpose(0, 1)
    if form == "with others":
        wide = torch.zeros((tokens, heads + 2, dim), dtype=row)
        wide[:, 1:-1] = rows
        return wide[:, 1:-1]
    return rows


def copied(made):
    """The same calls over memory of their own; planes of one memory stay so."""
    return deepcopy(made)


def written(call):
    """Everything that a call may write, as bytes, with what lies beside it."""
    tensors = [call.plane.cells, call.plane.scales, call.rows, call.skipped]
    return [
        torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage())
        for each in tensors
        if each is not None
    ]


def extent(tensor):
    """Bytes from a tensor's first number to behind its last."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
