"""The back ends `gs:` and `az:` over servers that speak their protocols: requests and refusals."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
from bucketserver import BUCKET, AzureServer, GcsServer
from store_calls import StoreCalls, name, soon

from kvtrie import ConfigError
from kvtrie.cli import main
from kvtrie.tiers.remote.check import check_store

pytest.importorskip("obstore")

CALLS = StoreCalls(3, 5000)
WRONG = {
    GcsServer: {"GOOGLE_BEARER_TOKEN": "hunter2-token"},
    AzureServer: {"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"hunter2-key").decode()},
}


@pytest.fixture(params=[GcsServer, AzureServer], ids=["gs", "az"])
def server(request, monkeypatch):
    for variable, value in request.param.environment.items():
        monkeypatch.setenv(variable, value)
    with request.param() as made:
        yield made


def test_a_put_is_conditional_and_an_existing_object_is_not_sent(server):
    store = CALLS.opened(server.url(server.port))
    assert store.conditional
    server.requests.clear()
    assert CALLS.put(store, 0) == CALLS.put(store, 0, as_of=1) == ["ok"]
    assert CALLS.get(store, 0) == ["ok"]
    sent = [(method, found) for method, _, found in server.requests]
    assert sent == [("HEAD", None), ("PUT", server.handler.new), ("HEAD", None), ("GET", None)]
    assert list(server.buckets[BUCKET]) == [f"kv/{name(0).hex()}"]


def test_two_writers_of_one_name_are_both_done(server, monkeypatch):
    store = CALLS.opened(server.url(server.port))
    CALLS.put(store, 0)

    async def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(store, "_exists", missing)
    assert CALLS.put(store, 0, as_of=1) == ["ok"]
    monkeypatch.delattr(store, "_exists")
    assert CALLS.get(store, 0) == ["ok"]


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(server):
    with pytest.raises(ConfigError, match="no such bucket"):
        CALLS.opened(server.url(server.port, "none"))
    assert list(server.buckets) == [BUCKET]


def test_wrong_credentials_are_one_clear_error(server, monkeypatch):
    store = CALLS.opened(server.url(server.port))
    assert CALLS.put(store, 0) == ["ok"]
    for variable, value in WRONG[type(server)].items():
        monkeypatch.setenv(variable, value)
    server.requests.clear()
    with pytest.raises(ConfigError, match="may not be used") as raised:
        CALLS.opened(server.url(server.port))
    assert "hunter2" not in str(raised.value) + repr(raised.value.__cause__)
    assert server.requests == []


def test_credentials_that_are_withdrawn_are_refused_results(server, monkeypatch):
    store = CALLS.opened(server.url(server.port))
    CALLS.put(store, 0)
    monkeypatch.setattr(server.handler, "allowed", lambda *_: False)
    assert CALLS.get(store, 0) == CALLS.put(store, 1) == CALLS.exists(store, 0) == ["refused"]
    (removed,) = store.remove_many([name(0)], soon())
    # obstore has no error of its own for a batch, which Azure's deletions are.
    assert removed.outcome == ("refused" if type(server) is GcsServer else "unreachable")
    assert len(server.buckets[BUCKET]) == 1


def test_the_check_command_tries_the_store_and_leaves_it_empty(
    server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(check_store.__kwdefaults__, "sizes", (1 << 16, 1 << 18))
    out = tmp_path / "lanes.toml"
    status = main(["remote", "check", server.url(server.port), "--json", "--out", str(out)])
    document = json.loads(capsys.readouterr().out)
    assert (status, document["ok"]) == (0, True)
    assert server.buckets == {BUCKET: {}}


def test_threads_leave_python_before_the_interpreter_ends():
    # obstore's threads wait for the interpreter's lock after a call, as this one does.
    code = (
        "import os, sys, threading\n"
        "import kvtrie.tiers.remote.object\n"
        "lock, begun = threading.Lock(), threading.Event()\n"
        "lock.acquire()\n"
        "def wait():\n"
        "    begun.set()\n"
        "    lock.acquire()\n"
        "    os.write(1, b'left')\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "begun.wait()\n"
        "sys.setswitchinterval(1000)\n"
        "lock.release()"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert ended.stdout == b"left"
