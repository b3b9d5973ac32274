"""Every kernel as a loop over single numbers, with formats and addresses written out.

Invariant: nothing of torch's arithmetic or rounding is used; products and sums are fp32 one by
one, formats are rounded in fp64, where that is exact.
"""

from __future__ import annotations

import math

import numpy as np
import torch

F32 = np.float32
SHAPES = {  # bits after the point, bias, largest exponent code that is a number
    torch.float16: (10, 15, 30),
    torch.bfloat16: (7, 127, 254),
    torch.float8_e4m3fn: (3, 7, 15),
}
LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def decoded(bits, dtype):
    """The number that some bits are."""
    if dtype == torch.float32:
        return F32(np.uint32(bits & 0xFFFFFFFF).view(np.float32))
    if dtype == torch.int8:
        return F32(bits - 256 if bits > 127 else bits)
    mantissa, bias, _ = SHAPES[dtype]
    exponents = 8 * dtype.itemsize - 1 - mantissa
    sign = -1.0 if bits >> (exponents + mantissa) & 1 else 1.0
    exponent, rest = bits >> mantissa & (2**exponents - 1), bits & (2**mantissa - 1)
    if exponent == 0:
        return F32(sign * rest * 2.0 ** (1 - bias - mantissa))
    return F32(sign * (1 + rest / 2**mantissa) * 2.0 ** (exponent - bias))


def encoded(x, dtype):
    """The bits nearest to a finite fp32 number, ties to even."""
    if dtype == torch.float32:
        return int(F32(x).view(np.uint32))
    x = float(x)
    if dtype in LARGEST:
        x = min(max(x, -LARGEST[dtype]), LARGEST[dtype])
    if dtype == torch.int8:
        return round(x) & 0xFF
    mantissa, bias, top = SHAPES[dtype]
    sign = int(math.copysign(1, x) < 0) << (8 * dtype.itemsize - 1)
    x = abs(x)
    exponent = max(math.frexp(x)[1] - 1, 1 - bias) if x else 1 - bias
    units = round(x / 2.0 ** (exponent - mantissa))  # exact: a power of two, and round is to even
    code = units + ((exponent + bias - 1) << mantissa)
    return sign | min(code, (top + 1) << mantissa)


class Numbers:
    """A strided tensor as single bits, at addresses computed here."""

    def __init__(self, tensor):
        self.dtype, self.strides = tensor.dtype, tensor.stride()
        self.start = tensor.storage_offset()
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        self.words = flat.view(WORDS[tensor.element_size()]).numpy()
        self.mask = 2 ** (8 * tensor.element_size()) - 1

    def at(self, *index):
        return self.start + sum(i * s for i, s in zip(index, self.strides, strict=True))

    def __getitem__(self, index):
        return int(self.words[self.at(*index)]) & self.mask

    def __setitem__(self, index, bits):
        self.words[self.at(*index)] = np.array([bits], np.int64).astype(self.words.dtype)[0]


def run(call):
    """Do what a call says, number by number."""
    for at, plane in enumerate(call.planes):
        for layer in range(len(plane.cells)):
            run_plane(Part(call, at, layer))


class Part:
    """One layer of one plane of a call."""

    def __init__(self, call, at, layer):
        plane = call.planes[at]
        self.kernel, self.covers = call.kernel, call.covers
        self.slots, self.rotations = call.slots, call.rotations
        self.rope, self.turning = call.rope, call.keys and at == 0
        self.cells = plane.cells[layer]
        self.scales = None if plane.scales is None else plane.scales[layer]
        self.rows = call.rows[at][layer] if call.rows else None
        self.skipped = call.skipped
        self.deviation = None if call.deviation is None else call.deviation[at]


def run_plane(call):
    """Do what a call says for one layer of a plane."""
    capacity = call.cells.shape[0] * call.cells.shape[1]
    for i, slot in enumerate(call.slots.tolist()):
        by = int(call.rotations[i]) if call.rope is not None else 0
        inside = 0 <= slot < capacity and in_tables(call, by)
        call.skipped[i] = 0 if inside else 1
        if call.deviation is not None:
            call.deviation[i] = 0.0
        if inside and call.kernel == "paged_gather":
            gather(call, i, slot)
        elif inside:
            replace(call, i, slot, by)


def in_tables(call, by):
    """Whether the tables know a position, or a delta."""
    if call.rope is None:
        return True
    return 0 <= (abs(by) if call.kernel == "rerotate" else by) < call.rope.length


def gather(call, i, slot):
    """Row i becomes what stands in the slot."""
    cells, rows = Numbers(call.cells), Numbers(call.rows)
    stood = read(call, slot)
    for h, d in np.ndindex(*call.rows.shape[1:]):
        bits = cells[*divmod(slot, call.cells.shape[1]), h, d]
        rows[i, h, d] = bits if cells.dtype == rows.dtype else encoded(stood[h][d], rows.dtype)


def replace(call, i, slot, by):
    """The slot becomes row i, or what it was, turned by `by`."""
    heads, dim = call.cells.shape[2:]
    stood = fresh = read(call, slot)
    if call.kernel != "rerotate":
        rows = Numbers(call.rows)
        fresh = [[decoded(rows[i, h, d], rows.dtype) for d in range(dim)] for h in range(heads)]
    if call.rope is not None and call.turning:
        fresh = [turned(head, call.rope, by) for head in fresh]
    if call.deviation is not None:
        call.deviation[i] = sum(
            (float(fresh[h][d]) - float(stood[h][d])) ** 2 for h, d in np.ndindex(heads, dim)
        )
    note_scales(call, slot, fresh)
    cells = Numbers(call.cells)
    for h, d in np.ndindex(heads, dim):
        if keeps(call, d):
            continue
        bits = encoded(fresh[h][d] * (F32(1) / scale(call, slot, h)), cells.dtype)
        cells[*divmod(slot, call.cells.shape[1]), h, d] = bits


def keeps(call, d):
    """Whether a number of a head stays as it is: it does not turn and keeps its scale."""
    turns = call.rope is not None and 0 <= d - call.rope.first < call.rope.width
    return call.kernel == "rerotate" and call.covers not in {"token", "group"} and not turns


def read(call, slot):
    """The numbers in a slot, head by head."""
    cells = Numbers(call.cells)
    _, block_tokens, heads, dim = call.cells.shape
    return [
        [
            decoded(cells[*divmod(slot, block_tokens), h, d], cells.dtype) * scale(call, slot, h)
            for d in range(dim)
        ]
        for h in range(heads)
    ]


def turned(head, rope, by):
    """A head after rotation by `by` positions."""
    head, half = list(head), rope.width // 2
    for j in range(half):
        if rope.neighbours:
            a, b = rope.first + 2 * j, rope.first + 2 * j + 1
        else:
            a, b = rope.first + j, rope.first + half + j
        cos, sin = F32(rope.cos[abs(by), j]), F32(rope.sin[abs(by), j])
        sin = -sin if by < 0 else sin
        head[a], head[b] = (
            head[a] * cos - head[b] * sin,
            head[b] * cos + head[a] * sin,
        )
    return head


def scale(call, slot, h):
    """Scale of the codes of this slot and head."""
    if call.scales is None:
        return F32(1)
    block, token = divmod(slot, call.cells.shape[1])
    return decoded(Numbers(call.scales)[block, token, h], torch.float32)


def note_scales(call, slot, fresh):
    """Scales of a slot's own become the least that keep what is written inside the format."""
    if call.covers not in {"token", "group"}:
        return
    largest = F32(LARGEST[call.cells.dtype])
    peaks = [max(abs(x) for x in head) for head in fresh]
    if call.covers == "token":
        peaks = [max(peaks)] * len(peaks)
    scales, place = Numbers(call.scales), divmod(slot, call.cells.shape[1])
    for h, peak in enumerate(peaks):
        scales[*place, h] = encoded(max(peak / largest, F32(2.0**-126)), torch.float32)
