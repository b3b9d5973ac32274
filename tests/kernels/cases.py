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
from kvtrie.model.layout import Layout

KERNELS = ("paged_gather", "paged_scatter", "rerotate", "scatter_fused_recompute")
FAR = (-1, -(2**40), 2**31, 2**40, 2**62)


@st.composite
def calls(draw, kernel=None, rows=None, cells=None):
    """Calls over separate memory, as verbs make them: K and V together if their layouts are
    equal."""
    kernel = kernel or draw(st.sampled_from(KERNELS))
    cell = cells or draw(st.sampled_from(list(CELLS)))
    row = rows or draw(st.sampled_from(list(ROWS)))
    step = 16 // (step_format(cell) if kernel == "rerotate" else row).itemsize
    torch.manual_seed(draw(st.integers(0, 2**16)))
    pages = draw(_pages(cell, step, one_layer=kernel == "scatter_fused_recompute"))
    tokens = draw(st.integers(1, 9))
    capacity = pages.planes[0].capacity
    slots = draw(_indices(tokens, range(capacity), distinct=True))
    skipped = torch.full((tokens,), 7, dtype=torch.uint8)
    nothing = torch.empty(0, dtype=torch.int64)
    planes = pages.planes[:1] if kernel == "rerotate" else pages.planes
    given = []
    form = draw(st.sampled_from(["dense", "heads first", "with others"]))
    for plane in planes:
        layers, _, _, heads, dim = plane.cells.shape
        given.append(_rows(draw, (layers, tokens, heads, dim), row, pages.covers, form))
    alike = len({plane.cells.shape for plane in planes}) == 1
    parts = [slice(None)] if alike else [slice(0, 1), slice(1, 2)]
    made = [
        Call(
            kernel,
            planes[part],
            pages.covers,
            slots,
            skipped,
            () if kernel == "rerotate" else tuple(given[part]),
            nothing,
            keys=part.start in {None, 0},
        )
        for part in parts
    ]
    if kernel == "scatter_fused_recompute" and draw(st.booleans()):
        made = [
            replace(call, deviation=torch.full((len(call.planes), tokens), -1.0)) for call in made
        ]
    if kernel == "rerotate" or (kernel == "scatter_fused_recompute" and draw(st.booleans())):
        rope = draw(_ropes(planes[0].cells.shape[4], step))
        least = 1 - rope.length if kernel == "rerotate" else 0
        rotations = draw(_indices(tokens, range(least, rope.length), distinct=False))
        made = [replace(call, rope=rope, rotations=rotations) for call in made]
    return made


@st.composite
def _pages(draw, cell, step, *, one_layer):
    heads, dim = draw(st.integers(1, 3)), 2 * step * draw(st.integers(1, 3))
    latent = draw(st.booleans())
    split = not latent and draw(st.booleans())
    v_head_dim = 2 * step if split and draw(st.booleans()) else None
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
    layers, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    lo = draw(st.integers(0, layers - 1))
    hi = lo + 1 if one_layer else draw(st.integers(lo + 1, layers))
    block_tokens = draw(st.integers(1, 7))
    sizes = layout.planes(block_tokens, heads, dim, v_head_dim)
    planes = 1 if latent else 2
    by = {
        "none": None,
        "tensor": (hi - lo, 1),
        "head": (hi - lo, heads),
        "token": (hi - lo, blocks, block_tokens),
        "group": (hi - lo, blocks, block_tokens, heads),
    }[layout.scales]
    in_one_piece = order[:2] in {("block", "layer"), ("layer", "block")}
    if layout.scales in {"token", "group"} and in_one_piece and draw(st.booleans()):
        by = None  # after the numbers
    memory = [_memory(blocks * layers * size, cell) for size in sizes]
    pages = Pages.of(
        memory,
        layout,
        blocks=blocks,
        block_tokens=block_tokens,
        heads=heads,
        head_dim=dim,
        v_head_dim=v_head_dim,
        layers=layers,
        layer=(lo, hi),
        scales=[torch.rand(by) + 0.01 for _ in range(planes)] if by else (),
    )
    for plane in pages.planes if by is None else ():
        if plane.scales is not None:
            own = plane.scales if layout.scales == "group" else plane.scales[..., 0]
            own.copy_(torch.rand(own.shape) + 0.01)
    return pages


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


def _rows(draw, shape, row, covers, form):
    """Rows, side by side or head by head, some of them all zeros."""
    layers, tokens, heads, dim = shape
    rows = torch.randn(shape) * draw(st.sampled_from([1e-3, 1.0, 300.0]))
    if covers in {"token", "group"} and draw(st.booleans()):
        rows[:, 0] = 0.0
    rows = rows.to(row)
    if form == "heads first":
        return rows.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "with others":
        wide = torch.zeros((layers, tokens, heads + 2, dim), dtype=row)
        wide[:, :, 1:-1] = rows
        return wide[:, :, 1:-1]
    return rows


def copied(made):
    """The same calls over separate memory; planes of one memory stay so."""
    return deepcopy(made)


def written(call):
    """Everything that a call may write, as bytes, with the bytes next to it."""
    tensors = [call.skipped, *call.rows]
    for plane in call.planes:
        tensors += [plane.cells, plane.scales]
    return [
        torch.empty(0, dtype=torch.uint8, device=each.device).set_(each.untyped_storage())
        for each in tensors
        if each is not None
    ]


def extent(tensor):
    """Bytes from a tensor's first number to the end of its last."""
    if not tensor.numel():
        return 0
    reach = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
