"""Fixtures of engine tests: one torch thread, and a tiny Llama."""

import pytest
import torch
from tinymodels import COMMON
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small models only lose by sharing their work out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_llama():
    """A model that is equal in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **COMMON)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


@pytest.fixture
def waited(monkeypatch):
    """The layers that passes of a KvtrieCache wait for, in order."""
    from kvtrie.engines.transformers import arrival

    layers, wait = [], arrival.Arrival.wait
    monkeypatch.setattr(
        arrival.Arrival, "wait", lambda self, layer: (layers.append(layer), wait(self, layer))[1]
    )
    return layers
