"""Fixtures of selective caches' tests: one thread, and a small Llama."""

import pytest
import torch
from decoders import make


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small sizes only lose by sharing their work out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llama():
    """A random Llama, which a test leaves as it was."""
    return make()
