"""The benches of the GPU say when there is none, and their program is proved on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benches.gpu import __main__ as gpu
from benches.gpu.clock import Clock, Row

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here, to be measured")
def test_without_a_device_nothing_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benches.gpu", "--json"])
    gpu.main()
    assert json.loads(capsys.readouterr().out) == {"not_run": "not run: no CUDA device"}
    script = subprocess.run(
        [ROOT / "benches" / "gpu" / "run.sh", tmp_path / "kvtrie.whl"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert script.stdout == "not run: no CUDA device\n"


@pytest.mark.parametrize("name", ["bandwidth", "link", "overlap", "attention"])
def test_every_part_runs_through(name):
    rows, stopped = gpu.collected(gpu.parts(Clock(torch.device("cpu")))[name])
    assert rows
    assert not stopped
    for row in rows:
        assert math.isfinite(row.figure)
        assert row.figure > 0
        assert row.what in gpu.line(row)


def test_a_part_that_fails_says_so_and_keeps_its_rows():
    def part():
        yield Row("x", 1.0, "GB/s")
        raise RuntimeError("out of memory")

    assert gpu.collected(part) == ([Row("x", 1.0, "GB/s")], "RuntimeError: out of memory")


def test_a_goal_is_reached_or_missed():
    assert Row("x", 1.0, "GB/s", "copy", 0.85, 0.8).ok is True
    assert Row("x", 1.0, "GB/s", "copy", 0.75, 0.8).ok is False
    assert Row("x", 1.0, "GB/s", "copy", 0.75).ok is None
    assert "goal 80%: missed" in gpu.line(Row("x", 1.0, "GB/s", "copy", 0.75, 0.8))
