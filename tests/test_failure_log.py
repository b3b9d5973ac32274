"""FailureLog: one warning per place and reason, again when the reason changes or after a day."""

import logging

import numpy as np
import pytest
from keeping import SECOND, Clock, ask, prompt, serving

from kvtrie._kvtrie import Faults
from kvtrie.failure_log import FailureLog
from kvtrie.tiers import keyed_disk
from kvtrie.tiers.keyed_disk import KeyedDisk

DAY = 86_400 * SECOND
FULL = "writing segment {}.kv at {}: No space left on device (os error 28)"


@pytest.fixture
def lines(caplog):
    """The warnings so far; those that were returned are removed."""
    caplog.set_level(logging.WARNING, "kvtrie")

    def take():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return take


def test_a_reason_is_logged_once_a_day_whatever_its_numbers(lines):
    clock = Clock(0)
    failures = FailureLog(logging.getLogger("kvtrie"), clock)
    for at in range(100):
        failures.warn("/disk", FULL.format(f"{at:08x}", at))
    (line,) = lines()
    assert line.startswith("/disk: writing segment 00000000.kv at 0: No space left")
    clock.now = DAY - 1
    failures.warn("/disk", FULL.format("0000002a", 4096))
    assert lines() == []
    clock.now = DAY
    failures.warn("/disk", FULL.format("0000002a", 4096))
    failures.warn("/disk", FULL.format("0000002b", 4097))
    assert len(lines()) == 1


def test_another_reason_or_place_is_logged_at_once(lines):
    failures = FailureLog(logging.getLogger("kvtrie"), Clock(0))
    for _ in range(3):
        failures.warn("/disk", FULL.format("a", 1))
        failures.warn("/disk", "writing segment: Input/output error (os error 5)")
        failures.warn("/other", FULL.format("a", 1))
    assert len(lines()) == 3


def test_a_wall_clock_that_is_set_back_does_not_silence_it(lines):
    clock = Clock(10 * DAY)
    failures = FailureLog(logging.getLogger("kvtrie"), clock)
    for now in (10 * DAY, 0, 1, DAY):
        clock.now = now
        failures.warn("/disk", "full")
    assert len(lines()) == 3


def test_reasons_without_end_are_not_all_remembered(lines):
    failures = FailureLog(logging.getLogger("kvtrie"), Clock(0))
    for at in range(1000):
        failures.warn("/disk", "x" * at)
    assert len(lines()) == 1000
    assert len(failures._logged) < 1000


@pytest.mark.parametrize("kind", ["no-space", "write"])
def test_stores_to_a_failing_disk_are_logged_once_and_counted(tmp_path, lines, kind):
    faults = Faults()
    with serving(tmp_path, faults=faults) as executor:
        faults.inject(kind, per_mille=1000)
        for seed in range(20):
            ask(executor, prompt(seed, 2))
        executor.drain()
        assert executor.manager.stats().tiers["disk"].failed > 3
        (line,) = lines()
        assert line.startswith("tier 2 (disk)")
        assert "a block is not stored" in line
        faults.heal()
        for seed in range(20, 30):
            ask(executor, prompt(seed, 2))
        executor.drain()
        assert lines() == []


def test_writes_of_an_engine_to_a_full_disk_are_logged_once(tmp_path, lines, monkeypatch):
    faults, clock = Faults(), Clock(0)
    monkeypatch.setattr(keyed_disk, "DiskStore", faults.open)
    disk = KeyedDisk(tmp_path, meaning="a model", size=3000, blocks=8, clock=clock)
    faults.inject("no-space", per_mille=1000)
    block = np.zeros(3000, np.uint8)
    for at in range(20):
        assert disk.write_many([(b"key %d" % at, block)]) == [False]
    (line,) = lines()
    assert line.startswith(str(tmp_path))
    clock.now = DAY
    disk.write_many([(b"key", block)])
    assert len(lines()) == 1
    disk.close()
