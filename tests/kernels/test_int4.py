"""Int4: twins against a loop over single numbers, kernels on the host against twins, refusals."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import naive
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onhost import NEEDS_GPP, Host

from kvtrie._kvtrie import KERNELS as TEXTS
from kvtrie.errors import ConfigError
from kvtrie.kernels import ARCHS, Packed, compiled, int4, pack, unpack
from kvtrie.kernels.formats import ROWS

EXAMPLES = settings.default.max_examples
F32 = np.float32
KERNELS = ("pack_int4", "unpack_int4")


@st.composite
def packings(draw, row=None):
    """K or V in units with random bytes, a few of these units, and rows of them."""
    keys, tokens = draw(st.booleans()), draw(st.sampled_from([1, 7, 16, 32, 40]))
    heads, dim = draw(st.integers(1, 2)), 16 * draw(st.integers(1, 4))
    row = row or draw(st.sampled_from(list(ROWS)))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    count = draw(st.integers(1, 3))
    codes_at = 16 * draw(st.integers(0, 2))
    scales_at = codes_at + -(-tokens * heads * dim // 2 // 16) * 16
    packed = Packed(torch.empty(0), codes_at, scales_at, tokens, heads, dim, keys=keys)
    size = scales_at + 2 * int(np.prod(packed.scales))
    memory = torch.randint(0, 256, (4, -(-size // 16) * 16 + 16), dtype=torch.uint8)
    packed = replace(packed, memory=memory)
    for unit in int4._scales(packed):  # fp16 numbers, not NaN
        unit.copy_(torch.randn(unit.numel() // 2).half().view(torch.uint8))
    units = torch.tensor(draw(st.permutations(range(4)))[:count])
    scale = draw(st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 300.0, 1e6]))
    rows = torch.randn(count * tokens, heads, dim) * scale
    rows[:, :, draw(st.integers(0, dim - 1))] *= 8
    if row == torch.float16:
        rows = rows.clamp(-6e4, 6e4)
    return packed, units, rows.to(row)


def groups_of(packed):
    """For each scale of a block its index, and the token, head and number of all it covers."""
    for one, head, other in np.ndindex(*packed.scales[1:]):
        if packed.keys:
            first = 32 * one
            many = [(t, head, other) for t in range(first, min(first + 32, packed.block_tokens))]
        else:
            first = 32 * other
            many = [(one, head, d) for d in range(first, min(first + 32, packed.dim))]
        yield (one * packed.heads + head) * packed.scales[3] + other, many


def place(packed, token, head, number):
    """The byte of a code in a unit, and the bits that it is shifted by."""
    at = (token * packed.heads + head) * packed.dim + number
    return packed.codes_at + at // 2, 4 * (at % 2)


def half(memory, at, x):
    """Keep a number as fp16 in two bytes, and return it as it is kept."""
    bounded = F32(min(max(x, F32(-65504)), F32(65504)) + F32(0))
    bits = naive.encoded(bounded, torch.float16)
    memory[at : at + 2] = bits & 255, bits >> 8
    return naive.decoded(bits, torch.float16)


def loop_pack(packed, units, rows):
    apart = int(np.prod(packed.scales[1:]))  # of a least number from its scale
    for i, unit in enumerate(units.tolist()):
        memory, first = packed.memory[unit].numpy(), i * packed.block_tokens
        for at, many in groups_of(packed):
            numbers = [F32(rows[first + t, h, d].float().item()) for t, h, d in many]
            most, least, zero, lowest = max(numbers), min(numbers), F32(0), -8
            if packed.keys:
                lowest, zero = 0, half(memory, packed.scales_at + 2 * (at + apart), least)
                scale = half(memory, packed.scales_at + 2 * at, F32(F32(most - least) / F32(15)))
            else:
                extreme = F32((most if most > -least else least) * F32(-0.125))
                scale = half(memory, packed.scales_at + 2 * at, extreme)
            inverse = F32(1) / scale if scale else F32(0)
            for (t, h, d), x in zip(many, numbers, strict=True):
                exact = F32(F32(x - zero) * inverse)
                code = round(float(min(max(exact, F32(lowest)), F32(lowest + 15)))) & 15
                byte, shift = place(packed, t, h, d)
                memory[byte] = int(memory[byte]) & ~(15 << shift) | code << shift


def loop_unpack(packed, units, rows):
    apart = int(np.prod(packed.scales[1:]))
    for i, unit in enumerate(units.tolist()):
        memory, first = packed.memory[unit].numpy(), i * packed.block_tokens
        for at, many in groups_of(packed):
            halves = memory[packed.scales_at :].view(np.uint16)
            scale = naive.decoded(int(halves[at]), torch.float16)
            zero = naive.decoded(int(halves[at + apart]), torch.float16) if packed.keys else F32(0)
            for t, h, d in many:
                byte, shift = place(packed, t, h, d)
                code = int(memory[byte]) >> shift & 15
                signed = code - 16 if code > 7 and not packed.keys else code
                x = F32(F32(F32(signed) * scale) + zero)
                rows[first + t, h, d] = torch.tensor(float(x))


@given(packings())
@settings(max_examples=max(10, EXAMPLES // 2), deadline=None)
def test_twins_do_what_a_loop_does(made):
    packed, units, rows = made
    other, read, theirs = replace(packed, memory=packed.memory.clone()), rows.clone(), rows.clone()
    unpack(packed, units, read)
    loop_unpack(other, units, theirs)
    assert torch.equal(read, theirs)
    pack(packed, units, rows)
    loop_pack(other, units, rows)
    assert torch.equal(packed.memory, other.memory)


@given(packings())
def test_numbers_are_off_by_at_most_a_step_and_do_not_drift(made):
    packed, units, rows = made
    rows = rows.clamp(-6e4, 6e4).float()
    pack(packed, units, rows)
    read, again = torch.empty_like(rows), torch.empty_like(rows)
    unpack(packed, units, read)
    grouped = int4._grouped(packed, rows)
    along = 2 if packed.keys else -1
    largest = grouped.abs().amax(along, keepdim=True)
    if packed.keys:  # half a step, and the rounding of the least number
        spread = grouped.amax(along, keepdim=True) - grouped.amin(along, keepdim=True)
        most = spread / 15 * 0.51 + largest * 2.0**-10
    else:  # a step where the sign is not that of the largest magnitude
        most = largest / 8 * 1.01
    off = (int4._grouped(packed, read) - grouped).abs()
    assert (off <= most + 2.0**-20).all()
    pack(packed, units, read)
    unpack(packed, units, again)
    kept = int4._grouped(packed, again) - int4._grouped(packed, read)
    assert (kept.abs() <= largest * 2.0**-10 + 2.0**-20).all()


@NEEDS_GPP
@pytest.mark.parametrize(
    ("row", "sanitizer"), [*((row, "none") for row in ROWS), (torch.bfloat16, "address")]
)
def test_kernels_do_what_twins_do(row, sanitizer, objects, monkeypatch):
    monkeypatch.setattr(int4, "_THREADS", 48)
    host = Host(objects, ROWS[row], "int8", sanitizer=sanitizer)

    @given(packings(row))
    @settings(max_examples=EXAMPLES // 5, deadline=None)
    def check(made):
        packed, units, rows = made
        other, theirs = replace(packed, memory=packed.memory.clone()), rows.clone()
        host.start("pack_int4", int4.launch_of("pack_int4", packed, units, rows))
        pack(other, units, theirs)
        assert torch.equal(packed.memory, other.memory)
        assert torch.equal(rows, theirs)
        host.start("unpack_int4", int4.launch_of("unpack_int4", packed, units, rows))
        unpack(other, units, theirs)
        assert torch.equal(rows, theirs)
        assert torch.equal(packed.memory, other.memory)

    check()
    host.close()


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_a_gpu(arch):
    for kernel in KERNELS:
        for row in {"bf16", [*ROWS.values()][ARCHS.index(arch) % len(ROWS)]}:
            report = io.StringIO()
            code = compiled(kernel, arch, row, "int8", logs=report).code
            said = report.getvalue()
            assert code[:4] == b"\x7fELF"
            assert "warning" not in said
            assert "0 bytes stack frame, 0 bytes spill stores" in said
            assert int(re.search(r"Used (\d+) registers", said)[1]) <= 64


@given(packings())
def test_arguments_fit_the_signature(made):
    for kernel in KERNELS:
        what = int4.launch_of(kernel, *made)
        pattern = rf"__launch_bounds__\(MOST_THREADS\) {kernel}\((.*?)\) \{{"
        listed = re.search(pattern, TEXTS[f"{kernel}.cu"], re.DOTALL)[1].split(",")
        pointers = ["*" in each for each in listed]
        assert [isinstance(each, torch.Tensor) for each in what.arguments] == pointers


def sound(**more):
    memory = torch.zeros(3, 1024, dtype=torch.uint8)
    given_ = {"codes_at": 0, "scales_at": 256, "block_tokens": 16, "heads": 1, "dim": 32}
    return Packed(**({"memory": memory, "keys": True} | given_ | more))


ROWS_OF_ONE = torch.zeros(16, 1, 32)
REFUSED = {
    "a head of 24 numbers is no multiple of 16": (sound(dim=24), [0], torch.zeros(16, 1, 24)),
    "rows of 2 units are (32, 1, 32)": (sound(), [0, 1], ROWS_OF_ONE),
    "not torch.float64": (sound(), [0], ROWS_OF_ONE.double()),
    "units[0] is 3, 0 to 2 wanted": (sound(), [3], ROWS_OF_ONE),
    "units name 1 twice": (sound(), [1, 1], torch.zeros(32, 1, 32)),
    "scales at 264": (sound(scales_at=264), [0], ROWS_OF_ONE),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_kernels_cannot_serve_is_refused_before_anything_is_written(message):
    packed, units, rows = REFUSED[message]
    with pytest.raises(ConfigError) as refused:
        pack(packed, torch.tensor(units), rows)
    assert message in str(refused.value)
    assert not packed.memory.any()


def test_no_units_are_no_launch():
    pack(sound(), torch.empty(0, dtype=torch.int64), torch.empty(0, 1, 32))
