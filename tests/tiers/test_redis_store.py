"""The back end `redis:` over a small RESP server: values, deadlines, failures and bad settings."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest
from respserver import RespServer
from store_calls import StoreCalls, name, soon
from test_folder_store import PROMPT, SHAPE, SIZE, compute, fetch, world

from kvtrie import ConfigError, Layout, Scope
from kvtrie._kvtrie import ValueFormat
from kvtrie.metrics import Collector
from kvtrie.tiers.remote import RemoteStorage

pytest.importorskip("redis")

from kvtrie.tiers.remote.open import open_store
from kvtrie.tiers.remote.url import RemoteUrl

CALLS = StoreCalls(3, 5000)
FORM, put, get, exists = CALLS.form, CALLS.put, CALLS.get, CALLS.exists


@pytest.fixture
def server():
    with RespServer() as made:
        yield made


def opened(server, query="", form=None, user=""):
    return CALLS.opened(f"redis://{user}127.0.0.1:{server.port}/0{query}", form)


def test_values_are_read_as_they_were_written(server):
    store = opened(server)
    assert put(store, 0, 1, 2) == ["ok"] * 3
    assert exists(store, 0, 3, 2) == ["ok", "missing", "ok"]
    assert get(store, 0, 3, 2, 1) == ["ok", "missing", "ok", "ok"]
    for layers in ((0, 1), (1, 3), (2, 3)):
        assert get(store, 3, 1, 0, layers=layers) == ["missing", "ok", "ok"]
    store.remove_many([name(0)], soon())
    assert exists(store, 0, 1) == ["missing", "ok"]
    assert server.served == 1
    store.close()
    assert get(store, 1) == ["unreachable"]


def test_an_existing_value_is_not_sent_again(server):
    store = opened(server)
    put(store, 0)
    before = server.values[name(0)]
    server.calls.clear()
    assert put(store, 0, 1) == ["ok", "ok"]
    assert server.calls == ["EXISTS", "EXISTS", "SET"]
    # Another process may be first between the question and the write.
    server.values.pop(name(1))
    server.answer = lambda name, words: (
        b":0\r\n" if name == "EXISTS" else RespServer.answer(server, name, words)
    )
    assert put(store, 0, 1) == ["ok", "ok"]
    assert server.values[name(0)] == before


def test_a_hit_refreshes_the_time_to_live_once_per_half_of_it(server, monkeypatch):
    now = time.monotonic_ns()
    monkeypatch.setattr("kvtrie.tiers.remote.redis.time.monotonic_ns", lambda: now)
    store = opened(server, "?ttl=1000")
    put(store, 0)
    assert server.expiry[name(0)] == 1_000_000
    start = now
    for later, refreshed in ((0, 1), (499, 1), (500, 2), (999, 2), (1000, 3)):
        now = start + later * 1_000_000_000
        assert get(store, 0, deadline=now + 10**10) == ["ok"]
        assert server.calls.count("PEXPIRE") == refreshed


@pytest.mark.parametrize("length", [0, 10, FORM.value_bytes - 1, FORM.value_bytes + 1, 10**6])
def test_a_value_of_another_length_is_damaged_and_the_next_is_read(server, length):
    store = opened(server)
    put(store, 1)
    server.values[name(0)] = bytes(length)
    assert get(store, 0, 1) == ["damaged", "ok"]
    if length < FORM.layer_at(1):  # a range of a longer one is there, and is not proved here
        assert get(store, 0, 1, layers=(0, 1)) == ["damaged" if length else "missing", "ok"]


def test_a_stalled_value_is_late_at_the_deadline(server):
    store = opened(server)
    put(store, 0, 1)
    server.stalled.set()
    assert get(store, 0, 1, deadline=soon(0.2)) == ["late", "late"]
    server.stalled.clear()
    server.released.set()
    # The connection that was in the middle of a value is not used again.
    assert get(store, 0, 1) == ["ok", "ok"]
    assert server.served == 2
    assert get(store, 0, deadline=soon(-1)) == ["late"]


def test_a_value_that_is_cut_is_unreachable_and_the_next_call_goes_on(server):
    store = opened(server)
    put(store, 0, 1)
    server.cut = 7000
    assert get(store, 0, 1) == ["unreachable", "unreachable"]
    server.cut = None
    assert get(store, 0, 1) == ["ok", "ok"]


def test_a_server_that_was_restarted_is_reached_again(server):
    store = opened(server)
    put(store, 0)
    port = server.port
    server.stop()
    assert get(store, 0) == ["unreachable"]
    assert put(store, 1) == ["unreachable"]
    server.start(port)
    assert get(store, 0) == ["ok"]
    # An idle connection that the server closed is replaced within the call.
    server.stop()
    server.start(port)
    assert get(store, 0) == ["ok"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "full"),
        (b"-NOPERM this user has no permissions\r\n", "refused"),
        (b"-READONLY You can't write against a read only replica.\r\n", "refused"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "unreachable"),
        (b"-WRONGTYPE Operation against a key\r\n", "damaged"),
        (b"+PONG\r\n", "unreachable"),
        (b"$-5\r\n", "unreachable"),
        (b"$many\r\n", "unreachable"),
        (b"x" * 5000, "unreachable"),
        (b"$99999999999999999999\r\n", "unreachable"),
    ],
)
def test_an_error_or_nonsense_is_a_result(server, error, outcome):
    store = opened(server)
    put(store, 0)
    server.error = error
    deadline = soon(0.5)
    found = get(store, 0, 1, deadline=deadline)
    assert set(found) <= {outcome, "late"}
    assert put(store, 2, deadline=soon(0.5)) in ([outcome], ["late"])
    server.error = None
    assert get(store, 0) == ["ok"]


def test_a_password_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    with RespServer("hunter2") as server:
        with pytest.raises(ConfigError, match="the password was refused") as raised:
            opened(server, user=":hunter3@")
        assert "hunter3" not in str(raised.value) + repr(raised.value.__cause__)
        put(opened(server, user=":hunter2@"), 0)
        file = tmp_path / "password"
        with pytest.raises(ConfigError, match=r"password_file .*No such file"):
            opened(server, f"?password_file={file}")
        file.write_text("\n")
        with pytest.raises(ConfigError, match="is empty"):
            opened(server, f"?password_file={file}")
        file.write_text("hunter2\n")
        assert get(opened(server, f"?password_file={file}"), 0) == ["ok"]
        monkeypatch.setenv("KVTRIE_REDIS_PASSWORD", "hunter2")
        assert get(opened(server), 0) == ["ok"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis:///0", "names no host"),
        ("redis://127.0.0.1/zero", "'zero', a number wanted"),
        ("redis://127.0.0.1/0?ca=/x", "redis: has no option 'ca'"),
        ("redis://127.0.0.1/0?ttl=0", r"ttl of redis: is 0\.0"),
        ("rediss://127.0.0.1/0?ca=/nowhere", "/nowhere is no file"),
        ("unix:?db=0", "names no socket"),
    ],
)
def test_a_bad_setting_is_one_clear_error(url, said):
    with pytest.raises(ConfigError, match=said):
        open_store(RemoteUrl.parse("url", url), FORM)


def test_a_block_above_the_servers_limit_is_refused(server):
    large = ValueFormat(layers=2, layer_bytes=256 << 20, block_tokens=4, meaning=bytes(32))
    with pytest.raises(ConfigError, match="a block of 536875008 bytes, at most 536870912"):
        opened(server, form=large)


@pytest.mark.skipif(os.name != "posix", reason="needs a file descriptor")
def test_large_pipelines_do_not_block_each_other(server):
    store = opened(server)
    for _ in range(3):
        assert put(store, *range(6)) == ["ok"] * 6
        assert get(store, *range(6)) == ["ok"] * 6


def test_one_executor_writes_and_another_finds_and_loss_of_the_server_is_a_miss(server):
    url = f"redis://127.0.0.1:{server.port}/0"
    with world(url) as executor:
        compute(executor, PROMPT)
    assert len(server.values) == 6
    with world(url) as executor:
        found = executor.prefetch(PROMPT, deadline_s=30.0)
        assert found == (6, 6, 0, 0)
        executor.drain()
        assert fetch(executor, PROMPT) == len(PROMPT)
    with world(url) as executor:
        assert executor.prefetch(PROMPT[:8], deadline_s=30.0).found == 2
        executor.drain()
        port = server.port
        server.stop()
        assert executor.prefetch(PROMPT, deadline_s=30.0) == (4, 0, 0, 4)
        assert fetch(executor, PROMPT) == 8
        server.start(port)
        assert executor.prefetch(PROMPT, deadline_s=30.0).found == 4
        executor.drain()
        assert fetch(executor, PROMPT) == len(PROMPT)


def test_a_server_that_is_not_there_is_a_warning_or_with_strict_an_error(server, caplog):
    url = f"redis://127.0.0.1:{server.port}/0"
    server.stop()
    with pytest.raises(ConfigError, match="is unreachable"):
        world(f"{url}?strict=1")
    with world(url) as executor:
        assert "is unreachable, a probe follows" in caplog.text
        assert executor.pools[2].stats().breaker == "open"
        compute(executor, PROMPT)
        assert fetch(executor, PROMPT) == len(PROMPT)


@pytest.mark.parametrize(
    "other",
    [
        {"layout": Layout(dtype="float16")},
        {"rank": 0, "ranks": 2},
        {"secret": b"another"},
    ],
)
def test_blocks_of_another_meaning_are_not_found(server, other):
    url = f"redis://127.0.0.1:{server.port}/0"
    with world(url) as executor:
        compute(executor, PROMPT)
        keys = executor.manager.keys(PROMPT)
        foreign = executor.manager.keys(PROMPT, scope=Scope(tenant=b"other"))
        assert executor.pools[2].find(keys, soon()).blocks == 6
        assert executor.pools[2].find(foreign, soon()).blocks == 0
    with closing(RemoteStorage(url, SHAPE, SIZE, **other)) as storage:
        assert storage.find(keys, soon()).blocks == 0


def test_counters_of_the_store_are_exported(server):
    prometheus = pytest.importorskip("prometheus_client")
    url = f"redis://127.0.0.1:{server.port}/0"
    with world(url) as executor:
        compute(executor, PROMPT)
        registry = prometheus.CollectorRegistry()
        registry.register(Collector(executor))

        def exported(name, **labels):
            return registry.get_sample_value(f"kvtrie_remote_{name}", {"machine": "0", **labels})

        assert exported("results_total", operation="put", outcome="ok") == 6
        assert exported("written_bytes_total") == executor.pools[2].stats().bytes_written > 0
        assert exported("breaker_open") == 0
        executor.pools[2].breaker.open()
        executor.pools[2].count_dropped(3)
        assert exported("breaker_open") == 1
        assert exported("dropped_blocks_total", reason="late") == 3


def test_values_are_asked_for_by_bytes_ahead_and_names_all_at_once(server, monkeypatch):
    from kvtrie.tiers.remote import redis

    asked = []

    def send(sock, parts, deadline):
        asked.append(sum(bytes(part) in {b"GET", b"EXISTS"} for part in parts))
        return resp_send(sock, parts, deadline)

    resp_send = redis.send
    monkeypatch.setattr(redis, "send", send)
    monkeypatch.setattr(redis, "_AHEAD", 3 * FORM.value_bytes)
    with closing(opened(server)) as store:
        assert put(store, *range(6)) == ["ok"] * 6
        asked.clear()
        assert get(store, *range(6)) == ["ok"] * 6
        assert asked == [3, 1, 1, 1, 0, 0]
        asked.clear()
        assert exists(store, *range(6)) == ["ok"] * 6
        assert sum(asked[:1]) == sum(asked) == 6
