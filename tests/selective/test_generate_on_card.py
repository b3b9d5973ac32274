"""Selective generation on a device gives the tokens that it gives on a CPU."""

import pytest
import torch
from decoders import make

from kvtrie.selective import CacheSettings, generate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["h2o-default", "lastrec-default"])
def test_tokens_are_those_of_a_cpu(name, device):
    settings = CacheSettings(name=name, cache_length=64, chunk_size=16)
    ids = torch.randint(97, (1, 150), generator=torch.Generator().manual_seed(1))
    given = {"max_new_tokens": 8, "do_sample": False}
    wanted = generate(make(), ids, settings, **given)
    made = generate(make().to(device), ids.to(device), settings, **given)
    assert torch.equal(made.cpu(), wanted)
