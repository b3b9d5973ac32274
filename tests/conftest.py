"""Fixtures of every test: hypothesis profiles, no GPU tests without a GPU, Ctrl-C in children.

HYPOTHESIS_PROFILE chooses how many random cases a property sees: fast (25), ci (200, the same
ones on every run) or deep (3000).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from grids import covering
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# Workers share the cores: one thread of torch each, also in children.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A slow machine is no failure: pytest's timeout guards each test as a whole.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("fast", max_examples=25, derandomize=True, **_ANY_SPEED)
settings.register_profile("ci", max_examples=200, derandomize=True, **_ANY_SPEED)
settings.register_profile("deep", max_examples=3000, **_ANY_SPEED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def _cuda_devices() -> int:
    """The number of CUDA devices, asked of the driver: importing torch would take seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves most cells of a `grid` to the deep run, and skips `gpu` tests without a device.

    Cells that a test marks `deep` itself count for no value.
    """
    grids: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid") and not item.get_closest_marker("deep"):
            grids[item.nodeid.partition("[")[0]].append(item)
    for cells in grids.values():
        kept = covering([cell.callspec.params for cell in cells])
        for at, cell in enumerate(cells):
            if at not in kept:
                cell.add_marker("deep")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_devices():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _no_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is for tests marked `gpu`: others see none, and neither do their children."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if torch := sys.modules.get("torch"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children inherit an ignored SIGINT, as where the tests run in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
