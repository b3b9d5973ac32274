"""Raw copies of rows: the kernel on the host, and which way a copy takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onhost import NEEDS_GPP, Host

from kvtrie.errors import ConfigError
from kvtrie.kernels import copy_rows
from kvtrie.kernels import rows as module
from kvtrie.kernels.rows import launches

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["none", "address", "thread"])
def host(request, objects):
    made = Host(objects, "fp32", "fp32", sanitizer=request.param)
    yield made
    made.close()


@st.composite
def copies(draw):
    """Two memories of rows of some vectors, further apart than they are wide, and pairs of rows."""
    width = 16 * draw(st.integers(1, 7))
    sides = []
    for _ in range(2):
        count, beyond = draw(st.integers(1, 12)), 16 * draw(st.integers(0, 2))
        memory = torch.randint(0, 256, (count, width + beyond), dtype=torch.uint8)
        sides.append(memory[:, :width])
    n = draw(st.integers(1, len(sides[1])))
    of = draw(st.lists(st.integers(0, len(sides[0]) - 1), min_size=n, max_size=n))
    to = draw(st.permutations(range(len(sides[1]))))[:n]
    return sides[0], np.array(of), sides[1], np.array(to)


@NEEDS_GPP
def test_the_kernel_copies_rows_and_nothing_else(host, monkeypatch):
    # A grid of two blocks of few threads goes round several times, also over parts of launches.
    monkeypatch.setattr(module, "_THREADS", 3)
    monkeypatch.setattr(module, "_CARD_BLOCKS", 2)
    monkeypatch.setattr(module, "_MOST_VECTORS", 40)

    @given(copies())
    @settings(max_examples=40)
    def check(made):
        source, of, target, to = made
        wanted = target.clone()
        wanted[to] = source[of]
        before = source.clone()
        for what in launches(source, of, target, to, CPU):
            host.start("paged_copy", what)
        assert torch.equal(target, wanted)
        assert torch.equal(source, before)

    check()


@given(copies())
def test_without_a_card_rows_are_copied_run_by_run(made):
    source, of, target, to = made
    wanted = target.clone()
    wanted[to] = source[of]
    copy_rows(source, of, target, to)
    assert torch.equal(target, wanted)


def test_no_rows_are_no_copy():
    nothing = np.empty(0, np.int64)
    copy_rows(torch.zeros(2, 16), nothing, torch.zeros(2, 16), nothing)


def test_short_runs_go_through_the_kernel_and_long_ones_do_not(monkeypatch):
    started = []
    monkeypatch.setattr(module, "_card", lambda *_: CPU)
    monkeypatch.setattr(module, "start", lambda *what: started.append(what))
    source, target = (torch.zeros(64, 16, dtype=torch.uint8) for _ in range(2))
    scattered = np.arange(0, 64, 2)
    copy_rows(source, scattered, target, scattered)
    [(kernel, what, device)] = started
    assert (kernel, device, what.arguments[-1]) == ("paged_copy", CPU, 32)
    monkeypatch.setattr(module, "_SHORT_BYTES", 16)
    copy_rows(source + 1, scattered, target, scattered)
    assert len(started) == 1
    assert target[scattered].all()
    monkeypatch.setattr(module, "_SHORT_BYTES", 1 << 20)
    copy_rows(source, np.arange(64), target, np.arange(64))  # one run
    assert len(started) == 1
    for wrong in ([-2, 0], [0, 64]):
        with pytest.raises(ConfigError, match=r"rows -?\d+ to \d+, 0 to 63 wanted"):
            copy_rows(source, np.array(wrong), target, np.array([3, 5]))
        with pytest.raises(ConfigError, match=r"rows -?\d+ to \d+, 0 to 63 wanted"):
            copy_rows(source, np.array([3, 5]), target, np.array(wrong))
    assert len(started) == 1
