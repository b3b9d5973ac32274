"""The benchmark of training runs on small sizes; it measures what it says."""

from __future__ import annotations

import argparse

import pytest
import torch

from benches.train import __main__ as bench


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small sizes only lose by sharing their work out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(not bench.Path("/proc/self/clear_refs").exists(), reason="no Linux")
def test_rows_of_the_benchmark(monkeypatch):
    def here(side, times, given):
        return bench.one(side, times, given.rounds, quick=True)

    monkeypatch.setattr(bench, "apart", here)
    monkeypatch.setattr(bench, "TIMES", {4: 1.5, 16: 0.75})
    rows = bench.measure(argparse.Namespace(rounds=1, quick=True))
    by_name = {row.what: row for row in rows}
    assert {"step 4 L", "step 16 L", "memory without checkpoints, 16 L"} <= set(by_name)
    assert by_name["checkpoints, 16 L"].ok
    assert by_name["checkpoints of 8 bits, 16 L"].ok
    assert by_name["gradient's cosine, checkpoints of 8 bits"].ok
