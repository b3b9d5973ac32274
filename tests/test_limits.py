"""Arguments that claim more than there is: an error or a result, never the end of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from greedy import METHODS, REQUIRED, SETTINGS
from surface import methods

import kvtrie
from kvtrie import BlockManager
from kvtrie._kvtrie import Lease

CHILD = Path(__file__).with_name("greedy.py")


def run(tmp_path, share):
    """Reports of the child, except of calls that went as they should."""
    output = tmp_path / "output"
    made = subprocess.run(
        [sys.executable, CHILD, output, share], capture_output=True, text=True, check=False
    )
    lines = output.read_text(encoding="utf-8").splitlines()
    assert made.returncode == 0, (lines[-1:], made.stderr[-3000:])
    assert lines[-1].startswith("END ")
    assert [line for line in lines if line.startswith("FAILED")] == []
    return int(lines[-1].removeprefix("END "))


def test_every_method_of_manager_lease_and_settings_is_called():
    assert set(REQUIRED["BlockManager"]) == set(methods(BlockManager))
    assert set(REQUIRED["Lease"]) == set(methods(Lease))
    shown = [getattr(kvtrie, name) for name in kvtrie.__all__]
    settings = {one for one in shown if hasattr(one, "__dataclass_fields__")}
    assert settings <= set(SETTINGS)
    for one in settings:
        with_arguments = {name for name, said in methods(one).items() if len(said.parameters) > 1}
        assert with_arguments <= {method for kind, method in METHODS if kind is one}, one


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_under_three_gigabytes_no_argument_ends_the_process(tmp_path):
    assert run(tmp_path, "share") > 2000


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_under_three_gigabytes_no_argument_ends_any_kind_of_manager(tmp_path):
    assert run(tmp_path, "whole") > 9000
