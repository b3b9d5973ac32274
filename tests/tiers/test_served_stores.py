"""Back ends over real servers: values, damage, deadlines, lost servers, and blocks of others.

`make stores` installs the servers; tests of a missing one are skipped by its name.
"""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import pytest
from bucketserver import AzureServer, GcsServer
from store_calls import StoreCalls, name, soon
from test_folder_store import PROMPT, SHAPE, SIZE, compute, fetch, values, world
from tests import namespace, store_servers
from tests.tcp_proxy import TcpProxy

from kvtrie import Layout, Scope
from kvtrie._kvtrie import ValueFormat
from kvtrie.tiers.remote import Put, RemoteStorage, RemoteUrl
from kvtrie.tiers.remote.check import check_store

LAYER = 200_000
CALLS = StoreCalls(3, LAYER)
opened, put, get, exists = CALLS.opened, CALLS.put, CALLS.get, CALLS.exists


def folder_place(folder):
    yield None, lambda _: f"folder:{folder / 'kv'}"


def redis_place(folder, start=store_servers.valkey):
    pytest.importorskip("redis")
    with start(folder) as server:
        yield server, lambda port: f"redis://127.0.0.1:{port}/0"


def real_redis_place(folder):
    yield from redis_place(folder, store_servers.redis)


def tls_place(folder):
    pytest.importorskip("redis")
    files = store_servers.certificates(folder / "certificates")
    with store_servers.redis_tls(folder, files) as server:
        yield server, lambda port: f"rediss://localhost:{port}/0?ca={files / 'ca.pem'}"


def cluster_place(folder):
    pytest.importorskip("redis")
    with store_servers.valkey_cluster(folder) as server:
        yield server, lambda port: f"redis://127.0.0.1:{port}?cluster=1"


def object_place(folder, start=store_servers.moto):
    pytest.importorskip("obstore")
    with start(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", store_servers.ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", store_servers.SECRET)
        bucket = store_servers.make_bucket(server)
        query = "region=us-east-1&endpoint=http://127.0.0.1"
        yield server, lambda port: f"s3://{bucket}/kv?{query}:{port}"


def real_object_place(folder):
    yield from object_place(folder, store_servers.seaweedfs)


def protocol_place(_, kind=GcsServer):
    pytest.importorskip("obstore")
    with kind() as server, pytest.MonkeyPatch.context() as patch:
        for variable, value in kind.environment.items():
            patch.setenv(variable, value)
        yield server, server.url


def azure_place(folder):
    yield from protocol_place(folder, AzureServer)


def mooncake_place(folder):
    if not namespace.INSIDE:
        pytest.skip("test_mooncake_store.py runs it in a network namespace")
    sys.path.append(str(store_servers.SITE))
    with store_servers.mooncake(folder) as server:
        url = f"mooncake://127.0.0.1:{server.port}"
        with closing(opened(f"{url}?segment_bytes={256 << 20}")):
            yield server, lambda port: f"mooncake://127.0.0.1:{port}"


PLACES = {
    "folder": folder_place,
    "redis": real_redis_place,
    "valkey": redis_place,
    "tls": tls_place,
    "cluster": cluster_place,
    "moto": object_place,
    "seaweedfs": real_object_place,
    "gcs": protocol_place,
    "azure": azure_place,
    "mooncake": mooncake_place,
}


@pytest.fixture(scope="module", params=PLACES)
def place(request, tmp_path_factory):
    """A server, or None, and the URL of a port."""
    yield from PLACES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def store(place):
    server, url = place
    with closing(opened(url(server and server.port))) as store:
        yield store
        store.remove_many([name(at) for at in range(9)], soon())


@pytest.fixture
def proxied(place):
    """A proxy in front of the server, and a store through it."""
    server, url = place
    if server is None or "cluster" in url(1) or "mooncake" in url(1):
        pytest.skip("no proxy in front of a folder, a cluster or memory of many machines")
    with TcpProxy(server.port) as proxy, closing(opened(url(proxy.port))) as store:
        yield proxy, store
        proxy.release()
        store.remove_many([name(at) for at in range(9)], soon())


def test_values_are_read_as_they_were_written(store):
    assert exists(store, 0, 1) == ["missing"] * 2
    assert put(store, *range(6)) == ["ok"] * 6
    assert exists(store, 0, 8, 5) == ["ok", "missing", "ok"]
    assert get(store, 5, 8, *range(5)) == ["ok", "missing", *["ok"] * 5]
    for layers in ((0, 1), (1, 3), (2, 3)):
        assert get(store, 8, 1, 0, layers=layers) == ["missing", "ok", "ok"]
    removed = store.remove_many([name(0), name(8)], soon())
    assert {one.outcome for one in removed} <= {"ok", "missing"}
    assert exists(store, 0, 1) == ["missing", "ok"]
    assert store.put_many([], soon()) == store.get_many([], soon()) == []


def test_the_first_of_two_values_of_a_name_stays(store):
    assert put(store, 0) == ["ok"]
    assert put(store, 0, 1, as_of=1) == ["ok", "ok"]
    assert get(store, 0, 1) == ["ok", "ok"]


def test_a_value_of_another_length_is_damaged_until_it_is_removed(place, store):
    server, url = place
    for layers, layer in ((2, LAYER), (4, LAYER)):
        short = ValueFormat(layers=layers, layer_bytes=layer, block_tokens=4, meaning=bytes(32))
        with closing(opened(url(server and server.port), short)) as other:
            memory = np.ones((layers, layer), np.uint8)
            other.put_many([Put(name(0), bytes(short.header_bytes), memory)], soon())
        put(store, 1)
        assert get(store, 0, 1) == ["damaged", "ok"]
        store.remove_many([name(0)], soon())
        assert put(store, 0) == ["ok"]
        assert get(store, 0) == ["ok"]
        store.remove_many([name(0)], soon())


def test_a_call_whose_deadline_has_passed_is_late(store):
    put(store, 0)
    for call in (get, put):
        assert call(store, 0, 1, deadline=soon(-1)) == ["late", "late"]


def test_a_stalled_store_is_late_at_the_deadline(proxied):
    proxy, store = proxied
    put(store, 0, 1)
    proxy.stall()
    for call in (get, put):
        # The proxy stays stalled: a call ends by its deadline or never.
        assert call(store, 0, 1, deadline=soon(0.3)) == ["late", "late"]
    proxy.release()
    assert get(store, 0, 1) == ["ok", "ok"]


def test_a_value_that_trickles_is_late_at_the_deadline(proxied):
    # A time limit per read is no deadline: each piece comes in time.
    proxy, store = proxied
    put(store, 0, 1)
    proxy.delay = 0.1
    assert "late" in get(store, 0, 1, deadline=soon(0.4))


def test_a_connection_cut_inside_a_value_is_no_value(proxied):
    proxy, store = proxied
    put(store, 0, 1)
    proxy.cut = 100_000
    assert set(get(store, 0, 1)) <= {"unreachable", "damaged"}
    proxy.release()
    assert get(store, 0, 1) == ["ok", "ok"]


def test_idle_connections_that_were_closed_are_replaced(proxied):
    proxy, store = proxied
    put(store, 0)
    proxy.drop()
    assert get(store, 0) == ["ok"]


@pytest.mark.parametrize(
    "other",
    [
        {"layout": Layout(dtype="float16")},
        {"rank": 0, "ranks": 2},
        {"secret": b"another"},
        {"scope": Scope(tenant=b"other")},
        {},
    ],
    ids=["layout", "ranks", "secret", "tenant", "same"],
)
def test_blocks_of_another_meaning_are_not_found(place, other):
    server, url = place
    place_url = url(server and server.port)
    with world(place_url) as executor:
        storage = executor.pools[2]
        keys = executor.manager.keys(PROMPT)
        if not storage.find(keys, soon()).blocks:
            compute(executor, PROMPT)
        theirs = executor.manager.keys(PROMPT, scope=other.get("scope"))
    settings = {name: value for name, value in other.items() if name != "scope"}
    with closing(RemoteStorage(place_url, SHAPE, SIZE, **settings)) as storage:
        assert storage.find(theirs, soon()).blocks == (0 if other else len(keys))


def test_a_check_finds_all_well_and_leaves_nothing(place):
    server, url = place
    seen = []
    parsed = RemoteUrl.parse("url", url(server and server.port))
    report = check_store(parsed, sizes=(1 << 16, 1 << 20), repeats=2, on_step=seen.append)
    assert [step for step in report.steps if not step.ok] == []
    assert [speed.bytes for speed in report.speeds] == [(1 << 16) + 4096, (1 << 20) + 4096]
    assert all(speed.plain_ns for speed in report.speeds)
    assert len(seen) == 3
    if parsed.scheme == "folder":
        assert [one for one in values(parsed.path) if one.stat().st_size > 50_000] == []


def test_one_process_writes_and_another_finds_until_the_server_is_killed(place):
    server, url = place
    place_url = url(server and server.port)
    with world(place_url) as executor:  # the last test of a place
        compute(executor, PROMPT)
    with world(place_url) as executor:
        assert executor.prefetch(PROMPT[: 2 * SIZE], deadline_s=30.0).found == 2
        executor.drain()
        assert fetch(executor, PROMPT) == 2 * SIZE
        assert executor.prefetch(PROMPT, deadline_s=30.0).found == 4
        executor.drain()
        assert fetch(executor, PROMPT) == len(PROMPT)
        if server is not None:
            server.kill()
            other = [1000 + token for token in PROMPT]
            assert executor.prefetch(other, deadline_s=10.0).found == 0
            assert fetch(executor, other) == 0
