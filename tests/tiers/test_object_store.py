"""The back end `s3:` over moto, a server of the protocol: settings, credentials, failures."""

from __future__ import annotations

import asyncio

import pytest
from store_calls import name, soon
from test_served_stores import exists, get, opened, put
from tests import store_servers

from kvtrie import ConfigError, TransferError
from kvtrie._kvtrie import ValueFormat

pytest.importorskip("obstore")

from kvtrie.tiers.remote import object as objects

SECRET = "hunter2-secret"  # noqa: S105 - of no account


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with store_servers.moto(tmp_path_factory.mktemp("moto")) as server:
        store_servers.make_bucket(server)
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kvtrie")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def url_of(server, bucket="kvtrie-test", rest=""):
    return f"s3://{bucket}/kv?region=us-east-1&endpoint=http://127.0.0.1:{server.port}{rest}"


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(server):
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"s3://none/kv.*: no such bucket"):
            opened(url_of(server, "none"))


def test_an_ignored_conditional_put_is_logged_once_and_puts_are_plain(server, monkeypatch, caplog):
    send = objects.ObjectStore._send
    modes = []

    async def ignoring(self, path, value, mode):
        modes.append(mode)
        await send(self, path, value, "overwrite")

    monkeypatch.setattr(objects.ObjectStore, "_send", ignoring)
    store = opened(url_of(server))
    assert put(store, 0) == put(store, 0) == put(store, 1) == ["ok"]
    assert modes == ["create", "create", "overwrite", "overwrite"]
    assert get(store, 0, 1) == ["ok", "ok"]
    assert caplog.text.count("ignores conditional puts") == 1
    store.remove_many([name(0), name(1)], soon())


def test_two_writers_of_one_name_are_both_done(server, monkeypatch):
    store = opened(url_of(server))
    put(store, 0)

    async def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(store, "_exists", missing)
    assert put(store, 0, as_of=1) == ["ok"]
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kvtrie")
    assert get(store, 0) == ["ok"]
    store.remove_many([name(0)], soon())


def test_a_store_opens_and_answers_within_a_running_loop(server):
    async def inside():
        store = opened(url_of(server))
        return exists(store, 0)

    assert asyncio.run(inside()) == ["missing"]


def test_a_closed_store_does_not_answer(server):
    store = opened(url_of(server))
    store.close()
    with pytest.raises(TransferError, match="closed"):
        exists(store, 0)


def test_a_store_that_is_not_there_does_not_answer(monkeypatch):
    monkeypatch.setattr(objects, "_OPEN_S", 5.0)
    port = store_servers.free_port()
    with pytest.raises(TransferError) as raised:
        opened(f"s3://kvtrie-test/kv?region=us-east-1&endpoint=http://127.0.0.1:{port}")
    assert SECRET not in str(raised.value)


def test_wrong_credentials_are_one_clear_error(tmp_path, monkeypatch):
    with store_servers.seaweedfs(tmp_path / "server") as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", store_servers.ACCESS)
        with pytest.raises(ConfigError, match="may not be used") as raised:
            opened(url_of(server))
        assert SECRET not in str(raised.value) + repr(raised.value.__cause__)


def test_a_certificate_of_another_authority_is_one_clear_error(tmp_path):
    files = store_servers.certificates(tmp_path / "a")
    foreign = store_servers.certificates(tmp_path / "b") / "ca.pem"
    # The certificate is refused before the server's protocol matters: Redis has TLS soonest.
    with store_servers.redis_tls(tmp_path / "server", files) as server:
        url = url_of(server).replace("http:", "https:")
        with pytest.raises(ConfigError, match="certificate"):
            opened(f"{url}&ca={foreign}")
        with pytest.raises(TransferError):
            opened(f"{url}&ca={files / 'ca.pem'}")


@pytest.mark.deep
def test_a_store_is_reached_over_tls(tmp_path):
    files = store_servers.certificates(tmp_path / "a")
    given = ("--ssl-cert", files / "server.pem", "--ssl-key", files / "key.pem")
    with store_servers.moto(tmp_path / "server", *given) as server:
        store_servers.make_bucket(server, ca=files / "ca.pem")
        store = opened(url_of(server).replace("http:", "https:") + f"&ca={files / 'ca.pem'}")
        assert put(store, 0) == get(store, 0) == ["ok"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3:///kv", "names no bucket"),
        ("s3://me:hunter2@kv", "credentials come from the environment"),
        ("s3://kv?ttl=5", "s3: has no option 'ttl'"),
        ("gs://kv?region=x", "gs: has no option 'region'"),
        ("az://account", "az://account names no container: az://account/container/prefix wanted"),
        ("s3://kv?ca=/nowhere", "/nowhere: No such file"),
        ("s3://kv?connect_s=0", r"connect_s of s3: is 0\.0"),
    ],
)
def test_a_bad_setting_is_one_clear_error(url, said):
    with pytest.raises(ConfigError, match=said) as raised:
        opened(url)
    assert "hunter2" not in str(raised.value)


def test_a_block_above_the_limit_of_a_put_is_refused():
    large = ValueFormat(layers=2, layer_bytes=5 << 29, block_tokens=4, meaning=bytes(32))
    with pytest.raises(ConfigError, match="at most 5368709120 fit an object"):
        opened("s3://kv", large)


def test_bytes_are_copied_over_the_ends_of_memory():
    whole = bytes(range(60))
    for sizes in ((60,), (1, 59), (20, 20, 20), (59, 1), (0, 60)):
        for step in (1, 7, 60):
            targets = [memoryview(bytearray(size)) for size in sizes]
            for at in range(0, 60, step):
                objects._scatter(targets, at, memoryview(whole[at : at + step]))
            assert b"".join(targets) == whole
