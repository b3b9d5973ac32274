"""Codes against a loop over single numbers: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.selective import dequantise, quantise

F32 = np.float32


def by_hand(block, bits):
    low, high, top = block.min(), block.max(), F32(2**bits - 1)
    scale = max(F32((high - low) / top), F32(2.0**-23))
    zero = -int(np.rint(F32(low / scale)))
    inverse = F32(1) / scale
    codes = [min(max(int(np.rint(F32(x * inverse))) + zero, 0), 2**bits - 1) for x in block]
    return codes, scale, zero


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shift", [0.0, 5.5, -100.0])
def test_codes_are_those_of_a_loop(bits, shift):
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(bits)) + shift
    made = quantise(x, bits)
    for at, block in enumerate(x.numpy()):
        codes, scale, zero = by_hand(block, bits)
        assert made.scale[at].item() == scale
        assert made.zero[at].item() == zero
        mine = made.codes[at].tolist()
        if bits == 4:
            mine = [byte >> 4 for byte in mine] + [byte & 15 for byte in mine]
        assert mine == codes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("low", "high"), [(5, 6), (-6, -5), (-1, 1), (0, 1e-3), (1e4, 1e4 + 300)])
def test_blocks_anywhere_come_back_within_half_a_scale(bits, low, high):
    x = torch.rand(200, 64, generator=torch.Generator().manual_seed(1)) * (high - low) + low
    made = quantise(x, bits)
    error = (dequantise(made, torch.float32) - x).abs()
    # The rounding of fp32 at this size is added.
    assert (error <= made.scale * 0.5001 + 2.0**-22 * x.abs()).all()


def test_zero_points_of_eight_bits_would_be_seen(monkeypatch):
    from kvtrie.selective import quantiser

    def narrow(x, bits):
        made = plain(x, bits)
        return made._replace(zero=made.zero.to(torch.int8).to(torch.int32))

    plain = quantiser.quantise
    monkeypatch.setitem(globals(), "quantise", narrow)
    with pytest.raises(AssertionError):
        test_blocks_anywhere_come_back_within_half_a_scale(8, 5, 6)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1000.0, 3e4, -1e30])
def test_blocks_of_one_number_come_back(value):
    x = torch.full((2, 16), value)
    assert torch.allclose(dequantise(quantise(x, 8), torch.float32), x, rtol=1e-6)


def test_bytes_are_as_said():
    x = torch.zeros(10, 128, dtype=torch.bfloat16)
    for bits, wanted in ((8, 8.5), (4, 4.5)):
        codes, scale, zero, _ = quantise(x, bits)
        assert 8 * (codes.nbytes + scale.nbytes + zero.nbytes) / x.numel() == wanted
    assert dequantise(quantise(x, 8), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("bits", "width", "message"),
    [(3, 16, "8 or 4 bits, not 3"), (8, 8, "a block of 8 numbers"), (4, 17, "a block of 17")],
)
def test_what_is_refused(bits, width, message):
    with pytest.raises(ConfigError, match=message):
        quantise(torch.zeros(1, width), bits)
