"""The check of a shared store: which faults it names, and that it removes all that it wrote."""

from __future__ import annotations

from contextlib import closing

import pytest
from respserver import RespServer

from kvtrie._kvtrie import ValueFormat
from kvtrie.tiers.remote import RemoteUrl
from kvtrie.tiers.remote.check import Report, Speed, Step, check_store
from kvtrie.tiers.remote.folder import FolderStore
from kvtrie.tiers.remote.open import open_store

pytest.importorskip("redis")


class Replacing(RespServer):
    """A server that ignores NX, and forgets that it has a value when it is asked."""

    def answer(self, name, words):
        if name == "EXISTS" and self.values:
            return b":0\r\n"
        if name == "SET":
            self.values[words[1]] = words[2]
            return b"+OK\r\n"
        return super().answer(name, words)


class Altering(RespServer):
    """A server that changes the last byte of each value."""

    def _set(self, words):
        words[2] = words[2][:-1] + bytes([words[2][-1] ^ 3])
        return super()._set(words)


def checked(server, **settings):
    url = f"redis://:hunter2@127.0.0.1:{server.port}/0"
    report = check_store(RemoteUrl.parse("url", url), **settings)
    assert "hunter2" not in str(report)
    return report


def failed(report):
    return [step.name for step in report.steps if not step.ok]


def test_a_store_that_is_well_is_timed_and_empty_afterwards():
    with RespServer("hunter2") as server:
        report = checked(server, sizes=(1 << 16, 1 << 18), repeats=3)
        assert (report.ok, failed(report)) == (True, [])
        assert [speed.bytes for speed in report.speeds] == [(1 << 16) + 4096, (1 << 18) + 4096]
        assert set(report.lanes()) == {"remote read", "remote store"}
        assert server.values == {}


def test_a_size_above_the_stores_limit_is_left_out():
    with RespServer("hunter2") as server:
        report = checked(server, sizes=(1 << 16, 1 << 30), repeats=2)
        assert [speed.bytes for speed in report.speeds] == [(1 << 16) + 4096]


class Full(RespServer):
    """A server without room for values above 128 KiB."""

    def _set(self, words):
        return b"-OOM no room\r\n" if len(words[2]) > 1 << 17 else super()._set(words)


def test_a_block_that_does_not_fit_is_a_failed_step():
    with Full("hunter2") as server:
        report = checked(server, sizes=(1 << 16, 1 << 20, 1 << 21), repeats=2)
        assert [speed.bytes for speed in report.speeds] == [(1 << 16) + 4096]
        assert (report.ok, failed(report)) == (False, ["block of 1 MiB"])
        assert report.steps[-1].detail.startswith("put: ")
        assert "OOM no room" in report.steps[-1].detail
        assert server.values == {}


def test_a_value_that_is_gone_for_the_plain_client_is_a_failed_step(tmp_path, monkeypatch):
    def gone(_store, name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(FolderStore, "plain", gone)
    report = check_store(RemoteUrl.parse("url", f"folder:{tmp_path}"), sizes=(1 << 16,), repeats=1)
    assert (failed(report), report.speeds) == (["block of 0.0625 MiB"], ())
    assert report.steps[-1].detail.startswith("plain client: ")
    assert [*tmp_path.iterdir()] == []


def test_a_checked_folder_is_as_it_was(tmp_path):
    (tmp_path / "notes").write_text("notes")
    new = tmp_path / "new" / "kv"
    for folder in (tmp_path, new):
        assert check_store(RemoteUrl.parse("url", f"folder:{folder}"), sizes=(), repeats=1).ok
    assert [*tmp_path.iterdir()] == [tmp_path / "notes"]
    url = RemoteUrl.parse("url", f"folder:{new}")
    form = ValueFormat(layers=1, layer_bytes=4096, block_tokens=1, meaning=bytes(32))
    with closing(open_store(url, form)):
        before = {*new.rglob("*")}
    assert check_store(url, sizes=(), repeats=1).ok
    assert before <= {*new.rglob("*")}


def test_a_store_that_replaces_values_is_named_and_not_timed():
    with Replacing("hunter2") as server:
        report = checked(server)
        assert "conditional put" in failed(report)
        assert (report.ok, report.speeds) == (False, ())
        assert server.values == {}


def test_a_store_that_alters_values_is_named():
    with Altering("hunter2") as server:
        report = checked(server)
        assert {"read and compare", "conditional put"} <= set(failed(report))
        assert server.values == {}


def test_lanes_are_the_line_through_the_smallest_and_the_largest_size():
    def report(*points):
        speeds = tuple(Speed(size, 2 * ns, ns, None) for size, ns in points)
        return Report("folder:/kv", (Step("connect", ok=True, detail=""),), speeds)

    lanes = report((1000, 1500.0), (2000, 9e9), (3000, 3500.0)).lanes()
    assert lanes["remote read"] == {"bytes_per_s": 10**9, "latency_ns": 500}
    assert lanes["remote store"] == {"bytes_per_s": 5 * 10**8, "latency_ns": 1000}
    # Noise may make the large one faster; a lane has a bandwidth and no negative latency.
    assert report((1000, 4000.0), (3000, 3000.0)).lanes()["remote read"]["bytes_per_s"] == 10**9
