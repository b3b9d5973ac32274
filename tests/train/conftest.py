"""Fixtures of training's tests: one thread, and drawn steps."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small sizes only lose by sharing their work out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
