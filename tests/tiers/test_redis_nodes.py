"""Connections to real Redis and Valkey servers: certificates, passwords, memory, clusters."""

from __future__ import annotations

from contextlib import closing

import pytest
from store_calls import name, soon
from test_folder_store import PROMPT, compute, world
from test_served_stores import exists, get, opened, put
from tests import store_servers

from kvtrie import ConfigError

redis = pytest.importorskip("redis")


def test_a_certificate_of_another_authority_is_one_clear_error(tmp_path):
    files = store_servers.certificates(tmp_path / "a")
    foreign = store_servers.certificates(tmp_path / "b") / "ca.pem"
    with store_servers.redis_tls(tmp_path / "server", files) as server:
        url = f"rediss://:hunter2@localhost:{server.port}/0"
        for query in (f"?ca={foreign}", f"?ca={foreign}&cluster=1", ""):
            with pytest.raises(ConfigError, match="certificate") as raised:
                opened(url + query)
            assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_password_is_shown_nowhere(tmp_path, caplog, kind):
    start = getattr(store_servers, kind)
    with start(tmp_path / "server", "--requirepass", "hunter2") as server:
        for given in (":hunter3@", "hunter3:hunter3@", ""):
            with pytest.raises(ConfigError, match=r"refused|NOAUTH") as raised:
                opened(f"redis://{given}127.0.0.1:{server.port}/0")
            assert "hunter" not in str(raised.value).replace("hunter3:***@", "")
        (tmp_path / "password").write_text("hunter2\n")
        url = f"redis://127.0.0.1:{server.port}/0?password_file={tmp_path / 'password'}"
        with world(url) as executor:
            compute(executor, PROMPT)
            server.kill()
            executor.prefetch([1, *PROMPT], deadline_s=5.0)
            shown = repr(executor.pools[2].url) + str(executor.pools[2].stats()) + caplog.text
        assert "hunter2" not in shown


def test_a_full_server_refuses_values_and_keeps_those_it_has(tmp_path):
    with (
        store_servers.valkey(tmp_path, "--maxmemory", "3mb") as server,
        closing(opened(f"redis://127.0.0.1:{server.port}/0")) as store,
    ):
        found = [outcome for at in range(9) for outcome in put(store, at)]
        assert found[0] == "ok"
        assert found[-1] == "full"
        assert get(store, 0) == ["ok"]


def test_a_slot_that_moved_is_found_at_its_new_node(tmp_path):
    names = [name(at) for at in range(8)]
    with (
        store_servers.valkey_cluster(tmp_path) as server,
        closing(opened(f"redis://127.0.0.1:{server.port}?cluster=1")) as store,
    ):
        assert put(store, *range(8)) == ["ok"] * 8
        store.remove_many(names, soon())
        store_servers.move_slots(redis, server, names)
        assert exists(store, *range(8)) == ["missing"] * 8
        assert put(store, *range(8)) == ["ok"] * 8
        assert get(store, *range(8)) == ["ok"] * 8


def test_a_slot_on_its_way_is_served_by_both_nodes(tmp_path):
    names = [name(at) for at in range(8)]
    with (
        store_servers.valkey_cluster(tmp_path) as server,
        closing(opened(f"redis://127.0.0.1:{server.port}?cluster=1")) as store,
    ):
        assert put(store, 0, 2) == ["ok", "ok"]
        for at in (2, 5, 6):  # the value of 2 is still at the node that its slot leaves
            store_servers.begin_move(redis, server, names[at])
        assert exists(store, *range(8)) == ["ok", "missing", "ok", *["missing"] * 5]
        assert put(store, *range(8)) == ["ok"] * 8
        assert get(store, *range(8)) == ["ok"] * 8
        assert get(store, 5, 0, 6, layers=(1, 2)) == ["ok"] * 3
        assert exists(store, *range(8)) == ["ok"] * 8
        store.remove_many([names[6], names[0]], soon())
        assert exists(store, 6, 5, 0) == ["missing", "ok", "missing"]
