"""The back end `mooncake:`: all tests of served stores and its own, in a network namespace.

Its clients listen on every address of their machine, and its library needs some of Debian's, so the
tests run in a process of `unshare -n`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from store_calls import name, soon
from test_served_stores import exists, get, mooncake_place, opened, put
from tests import namespace, store_servers

from kvtrie import ConfigError, TransferError

HERE = Path(__file__).parent
inside = pytest.mark.skipif(
    not namespace.INSIDE, reason="test_all_of_it runs it in a network namespace"
)


@pytest.mark.deep
@pytest.mark.skipif(namespace.INSIDE, reason="runs the others")
def test_all_of_it():
    store_servers.program("mooncake")
    if not namespace.possible():
        pytest.skip("no network namespace: unshare -n does not work here")
    options = ["-q", "-rf", "-p", "no:cacheprovider", "--show-capture=no", "-k", "mooncake"]
    others = ("test_served_stores.py", "test_mooncake_machines.py", "test_sources.py")
    files = [Path(__file__), *(HERE / each for each in others)]
    ended = namespace.run("pytest", *options, *files, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout


@pytest.fixture
def place(tmp_path):
    yield from mooncake_place(tmp_path)


@inside
def test_questions_to_a_dead_master_are_abandoned_at_their_deadline(place):
    server, url = place
    store = opened(url(server.port))
    assert put(store, 0) == get(store, 0) == ["ok"]
    server.pause()
    assert [one.outcome for one in store.exists_many([name(0)], soon(0.3))] == ["late"]
    assert [one.outcome for one in store.remove_many([name(0)], soon(0.3))] == ["late"]
    server.resume()
    assert exists(store, 8) == ["missing"]
    store.close()
    with pytest.raises(TransferError, match="closed"):
        exists(store, 0)


@inside
def test_memory_of_one_block_is_registered_for_the_call(place):
    server, url = place
    store = opened(url(server.port))
    assert put(store, 0, 1) == get(store, 0, 1) == get(store, 0, 1, layers=(1, 3)) == ["ok", "ok"]
    assert set(store._known.values()) == {store._form.header_bytes}
    store.close()


@inside
def test_a_master_that_is_not_there_does_not_answer():
    sys.path.append(str(store_servers.SITE))
    with pytest.raises(TransferError, match=r"the master of mooncake://127\.0\.0\.1:1"):
        opened("mooncake://127.0.0.1:1")


@inside
def test_a_disk_needs_a_master_that_takes_disks(place, tmp_path):
    server, url = place
    with pytest.raises(ConfigError, match="start it with -enable_offload"):
        opened(f"{url(server.port)}?segment_bytes={16 << 20}&disk={tmp_path / 'kv'}")


@inside
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mooncake:", "names no master"),
        ("mooncake://127.0.0.1?segment_bytes=1GB", "segment_bytes of mooncake: is '1GB'"),
        ("mooncake://127.0.0.1?ttl=5", "mooncake: has no option 'ttl'"),
        ("mooncake://127.0.0.1?disk=/kv", "disk of mooncake: needs segment_bytes"),
        ("mooncake://127.0.0.1?segment_bytes=9&disk=/dev/null", "/dev/null: File exists"),
    ],
)
def test_a_bad_setting_is_one_clear_error(url, said):
    sys.path.append(str(store_servers.SITE))
    with pytest.raises(ConfigError, match=said):
        opened(url)
