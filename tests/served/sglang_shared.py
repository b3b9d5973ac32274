"""Pages of SGLang servers in a store that they share: found by others, proved, late at most."""

from __future__ import annotations

import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from hicache import PAGE, HostPool, Updater, indices, opened, served_model
from tests import namespace, store_servers
from tests.tcp_proxy import TcpProxy

from kvtrie._kvtrie import ValueFormat
from kvtrie.errors import ConfigError
from kvtrie.tiers.remote import RemoteUrl
from kvtrie.tiers.remote.open import open_store

KEYS = [f"hash {at}" for at in range(8)]


@pytest.fixture(autouse=True)
def model(monkeypatch):
    """A model in this process, as SGLang's workers have one."""
    return served_model(monkeypatch)


@contextmanager
def folder(path):
    yield f"folder:{path / 'shared'}"


@contextmanager
def valkey(path):
    pytest.importorskip("redis", reason="no client of Redis: make engines")
    with store_servers.valkey(path / "valkey") as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@contextmanager
def mooncake(path):
    """A Mooncake master, and a process of the store that lends it memory: this one."""
    if not namespace.INSIDE:
        pytest.skip("test_pages_in_memory_of_a_mooncake_store runs it in a network namespace")
    sys.path.append(str(store_servers.SITE))
    form = ValueFormat(layers=1, layer_bytes=1, block_tokens=1, meaning=bytes(32))
    with store_servers.mooncake(path / "mooncake") as server:
        url = f"mooncake://127.0.0.1:{server.port}"
        lent = RemoteUrl.parse("url", f"{url}?segment_bytes={256 << 20}")
        with closing(open_store(lent, form)):
            yield url


@pytest.mark.skipif(namespace.INSIDE, reason="runs the others")
def test_pages_in_memory_of_a_mooncake_store():
    store_servers.program("mooncake")
    if not namespace.possible():
        pytest.skip("no network namespace: unshare -n does not work here")
    options = ["-c", "tests/served/pytest.ini", "-o", "python_files=sglang_*.py", "--rootdir", "."]
    files = ["-q", "-rf", "--show-capture=no", "-k", "mooncake", Path(__file__)]
    ended = namespace.run("pytest", *options, *files, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "3 passed" in ended.stdout


@pytest.fixture(params=[folder, valkey, mooncake], ids=lambda one: one.__name__)
def url(request, tmp_path):
    with request.param(tmp_path) as place:
        yield place


def slow(**more):
    """Settings of a machine that is busy."""
    return {"extra": {"lookup_s": 10.0}, **more}


def write(storage, keys=KEYS):
    assert storage.batch_set_v1(keys, indices(range(len(keys)))) == [True] * len(keys)


def read(storage, keys=KEYS):
    """Number of leading pages that are found, all of whose bytes are right."""
    pool = storage.mem_pool_host
    right, pool.kv = HostPool().kv, torch.zeros_like(pool.kv)
    found = storage.batch_exists(keys)
    if found:
        loaded = storage.batch_get_v1(keys[:found], indices(range(found)))
        assert loaded == [True] * found
    assert (pool.kv[:, :, : found * PAGE] == right[:, :, : found * PAGE]).all()
    pool.kv = right
    return found


def test_another_server_finds_what_one_wrote(url):
    one, two = opened(url, **slow()), opened(url, **slow())
    write(one, KEYS[:5])
    assert read(two) == read(one) == 5
    write(two)
    assert read(one) == 8
    one.clear()  # other servers use the pages
    assert read(one) == 8
    one.close()
    assert read(two) == 8
    two.close()


def test_latent_kv_is_written_by_one_rank_and_read_by_all(url):
    ranks = [opened(url, **slow(is_mla_model=True, tp_size=2, tp_rank=at)) for at in range(2)]
    write(ranks[0])
    assert [read(rank) for rank in ranks] == [8, 8]
    parts = [opened(url, **slow(tp_size=2, tp_rank=at)) for at in range(2)]
    write(parts[0])
    assert [read(rank) for rank in parts] == [8, 0]
    [each.close() for each in ranks + parts]


def test_pages_of_other_weights_and_secrets_are_not_found(url, model, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    one = opened(url, **slow())
    write(one)
    keyed = opened(url, extra={"lookup_s": 10.0, "secret_file": str(secret)})
    assert read(keyed) == 0
    model.scale[0] = 2
    two = opened(url, **slow())
    assert read(two) == 0
    Updater().update_weights_from_tensor("answer")
    assert read(one) == 0
    assert one.batch_set_v1(KEYS[:1], indices([0])) == [False]
    [each.close() for each in (one, two, keyed)]


def test_a_damaged_page_is_a_miss_and_is_not_asked_for_again_at_once(tmp_path):
    with folder(tmp_path) as url:
        storage = opened(url, **slow())
        write(storage, KEYS[:1])
        (file,) = (tmp_path / "shared").glob("??/*")
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        assert storage.batch_exists(KEYS[:1]) == 1
        assert storage.get(KEYS[0]) is None
        assert storage.batch_exists(KEYS[:1]) == 0
        assert storage.pages.stats().results["get", "damaged"] == 1
        storage.close()


def test_a_store_that_hangs_answers_no_later_than_its_limits(tmp_path):
    limits = {"lookup_s": 0.1, "deadline_s": 0.3}
    with valkey(tmp_path) as url, TcpProxy(int(url.split(":")[-1].split("/")[0])) as proxy:
        storage = opened(f"redis://127.0.0.1:{proxy.port}/0", extra=limits)
        write(storage)
        storage.clear()
        proxy.stall()
        began = time.monotonic()
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_get_v1(KEYS, indices(range(8))) == [False] * 8
        assert storage.batch_set_v1(["another"], indices([0])) == [False]
        assert time.monotonic() - began < 5
        assert storage.pages.stats().breaker == "open"
        began = time.monotonic()
        for _ in range(100):
            assert storage.batch_exists(KEYS) == 0
        assert time.monotonic() - began < 5  # none of them reached the store
        proxy.release()
        storage.close()


def test_the_log_names_the_store_without_its_password(tmp_path, monkeypatch):
    from kvtrie.engines.sglang import storage as module

    lines = []
    monkeypatch.setattr(module._LOG, "info", lambda line, *more: lines.append(line % more))
    opened(f"folder:{tmp_path / 'kv'}", tp_size=2, is_mla_model=True).close()
    assert f"remote folder:{tmp_path / 'kv'}; block 8 tokens; 2 ranks" in lines[-1]


def test_a_store_that_cannot_be_is_refused_before_the_server_starts(tmp_path):
    with pytest.raises(ConfigError, match="deadline_s is 0"):
        opened(f"folder:{tmp_path / 'kv'}", extra={"deadline_s": 0})
    with pytest.raises(ConfigError, match=r"nfs://there.*: unknown scheme"):
        opened("nfs://there/kv")
    with pytest.raises(ConfigError, match=f"'folder:{tmp_path}', is read by all ranks"):
        opened(tmp_path, is_mla_model=True, tp_size=2)
