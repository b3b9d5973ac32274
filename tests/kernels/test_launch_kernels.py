"""Arguments that a launch hands to the driver, seen without one."""

from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from cases import KERNELS, calls
from hypothesis import given, settings

from kvtrie._kvtrie import KERNELS as TEXTS
from kvtrie.kernels import launch
from kvtrie.kernels.checks import MOST_THREADS
from kvtrie.kernels.formats import CELLS
from kvtrie.kernels.launch import Launch

SIGNATURE = re.compile(r"__launch_bounds__\(MOST_THREADS\) (\w+)\((.*?)\) \{", re.DOTALL)


@pytest.fixture(autouse=True)
def _no_streams():
    """Streams of a fake driver are not left to the next test."""
    yield
    launch._stream.cache_clear()


def parameters(kernel):
    """The kernel's parameters, in order: whether each is a pointer."""
    name, listed = SIGNATURE.search(TEXTS[f"{kernel}.cu"]).groups()
    assert name == kernel
    return ["*" in each for each in listed.split(",")]


@given(calls())
def test_arguments_fit_the_signature(made):
    for call in made:
        what = Launch.of(call)
        for given_, pointer in zip(what.arguments, parameters(call.kernel), strict=True):
            assert isinstance(given_, int if not pointer else (torch.Tensor, int))
            assert pointer or given_ >= 0
            assert not pointer or isinstance(given_, torch.Tensor) or given_ == 0
        x, y, z = what.block
        assert x * y * z <= MOST_THREADS
        assert z <= 64
        assert (what.grid[0] - 1) * z < len(call.slots) <= what.grid[0] * z
        assert what.grid[1:] == (len(call.planes[0].cells), len(call.planes))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_launch_asks_for_the_card_and_the_formats(kernel, monkeypatch):
    seen = []
    fake = SimpleNamespace(LaunchConfig=lambda **to: to, launch=lambda *to: seen.append(to))
    monkeypatch.setattr(launch, "core", lambda: fake)
    monkeypatch.setattr(launch, "loaded", lambda *what: what)
    monkeypatch.setattr(launch, "_arch", lambda _: "sm_120")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # that of a CPU's tensors
    stream_of = SimpleNamespace(from_handle=lambda handle: f"stream {handle}")
    monkeypatch.setattr(fake, "Stream", stream_of, raising=False)
    monkeypatch.setattr(launch, "_current", lambda _: 5)
    cell = torch.float8_e4m3fn

    @given(calls(kernel=kernel, rows=torch.float32, cells=cell))
    @settings(max_examples=5)
    def check(made):
        launch.launch(made[0])
        stream, config, what, *arguments = seen.pop()
        row = "bf16" if kernel == "rerotate" else "fp32"
        assert (stream, what) == ("stream 5", (kernel, "sm_120", row, CELLS[cell], 0))
        assert config == {"grid": Launch.of(made[0]).grid, "block": Launch.of(made[0]).block}
        assert arguments[0] == made[0].planes[0].cells.data_ptr()
        assert all(type(each) is int for each in arguments)

    check()


def test_a_launch_goes_to_the_device_of_its_tensors(monkeypatch):
    entered, asked = [], []
    fake = SimpleNamespace(
        LaunchConfig=lambda **_: None,
        launch=lambda *_: asked.append(list(entered)),
        Stream=SimpleNamespace(from_handle=lambda handle: handle),
    )

    @contextmanager
    def inside(at):
        entered.append(at)
        yield
        entered.remove(at)

    monkeypatch.setattr(launch, "core", lambda: fake)
    monkeypatch.setattr(launch, "loaded", lambda _, arch, *_formats: asked.append(arch))
    monkeypatch.setattr(launch, "_arch", lambda at: f"of {at}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", inside)
    monkeypatch.setattr(launch, "_current", lambda _: 5)
    what = Launch("fp32", "fp32", (1, 1, 1), (1, 1, 1), ())
    for device in ("cuda:2", "cuda:1"):
        launch.start("paged_copy", what, torch.device(device))
    assert asked == ["of 2", [2], "of 1", []]
