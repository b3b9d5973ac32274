"""Codes of torchao and bitsandbytes: what is missing is said; where they are, rows come back."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.selective import foreign, make_cache
from kvtrie.selective.buffers import Place, WorkingCopy
from kvtrie.selective.foreign import BitsAndBytes, TorchAo

NAMES = [f"{library}-quantized{bits}" for library in ("ao", "bnb") for bits in (8, 4)]
SIZES = {"batch": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 64, "dtype": torch.float32}


class Card:
    """A CPU that says it is a card: the libraries' codes run on both."""

    type = "cuda"


def made(kind, bits, dim=64, rows=6):
    place = Place((2, 2, rows, dim), torch.float32, torch.device("cpu"))
    buffers = object.__new__(kind)
    place.device = Card()
    try:
        kind.__init__(buffers, place, WorkingCopy(), bits=bits)
    except TypeError:  # torch takes no such device: by now all is checked
        place.device = torch.device("cpu")
        super(foreign._Foreign, buffers).__init__(place, WorkingCopy())
    return buffers


@pytest.mark.parametrize("name", NAMES)
def test_without_a_card_it_is_said(name):
    with pytest.raises(ConfigError, match="need a CUDA device, and this cache is on cpu"):
        make_cache(f"h2o-{name}", cache_length=8, **SIZES)


@pytest.mark.parametrize("kind", [TorchAo, BitsAndBytes])
def test_without_the_extra_it_is_said(kind, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(foreign.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"the extra `quant` .*install kvtrie\[quant\]"):
        made(kind, 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("kind", "module"), [(TorchAo, "torchao"), (BitsAndBytes, "bitsandbytes")])
def test_rows_come_back(kind, module, bits):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (extra quant)")
    buffers = made(kind, bits)
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(2, 2, 6, 64, generator=generator)
    rounded = buffers.rounded(x)
    assert rounded.shape == x.shape
    error = (rounded - x).norm() / x.norm()
    assert error < (0.02 if bits == 8 else 0.15)
    alone = buffers.rounded(x[1:, :, 2:3])
    assert torch.equal(alone, rounded[1:, :, 2:3])  # codes of a row depend on that row alone
    rows = torch.arange(6).expand(2, 2, 6)
    buffers.write(rows, x, x * 2)
    assert torch.equal(buffers.seen(6)[0], x)
    buffers.end_step()
    assert torch.equal(buffers.seen(6)[0], rounded)
    assert buffers.nbytes == 2 * 24 * (64 * bits // 8 + (8 if kind is TorchAo else 4))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_them_reads_on_a_card(name):
    pytest.importorskip("torchao" if name.startswith("ao") else "bitsandbytes")
    cache = make_cache(f"h2o-{name}", cache_length=16, device="cuda", **SIZES)
    exact = make_cache("h2o-default", cache_length=16, device="cuda", **SIZES)
    for new in (16, 4, 1):
        query = torch.randn(2, 4, new, 64, device="cuda")
        key, value = torch.randn(2, 2, 2, new, 64, device="cuda")
        assert (cache(query, key, value) - exact(query, key, value)).abs().max() < 1
    assert cache.token_pos.shape == (2, 2, 16)
