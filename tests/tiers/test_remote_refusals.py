"""Bad settings of a remote tier: one clear error each, before anything is served or written."""

from __future__ import annotations

import pytest
from bucketserver import GcsServer
from respserver import RespServer
from shelf import SHAPE, SIZE
from tests import store_servers

from kvtrie import BlockManager, ConfigError, ModelShape, Tier
from kvtrie.engines.vllm.settings import Settings
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

NUMBERS = (0, -1, float("inf"), float("nan"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", GcsServer.token)
    (tmp_path / "empty").touch()
    (tmp_path / "file").touch()
    return tmp_path


def opened(path, model=SHAPE, size=SIZE, **more):
    """Open the pools of a manager with a remote tier."""
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4)]
    tiers.append(Tier("remote", blocks=4, path=path, **more))
    BlockManager(model, tiers, block_tokens=size)
    return open_pools(model, tiers, size)


def refused(match, call, *arguments, **more):
    """The error of a call: one line, without a password."""
    with pytest.raises(ConfigError, match=match) as raised:
        call(*arguments, **more)
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        ("nfs://host/kv", {}, "nfs://host/kv: unknown scheme, one of"),
        ("kv", {}, "'folder:kv' is a folder"),
        ("folder:kv?size=3", {}, "folder: has no option 'size'"),
        ("redis://:hunter2@host/0?age=3", {}, "redis: has no option 'age'"),
        ("folder:file", {}, "file cannot be written"),
        ("rediss://127.0.0.1/0?ca=none", {}, "none is no file"),
        ("s3:///kv", {}, "names no bucket"),
        ("az://account", {}, "names no container"),
        ("folder:kv", {"secret_file": "none"}, "secret_file .*none: No such file"),
        ("folder:kv", {"secret_file": "empty"}, "secret_file .*empty is empty"),
        *(("folder:kv", {"workers": number}, "workers of tier 'remote'") for number in NUMBERS),
        *(("folder:kv", {"write_limit": n}, "write_limit of tier 'remote'") for n in NUMBERS),
        *(("folder:kv", {"trust_s": number}, "trust_s of tier 'remote'") for number in NUMBERS),
    ],
)
def test_a_setting_that_cannot_be_is_one_error_before_serving(path, more, why):
    refused(why, opened, path, **more)


@pytest.mark.parametrize("name", ["lookup_s", "deadline_s"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_seconds_out_of_range_is_one_error(name, number):
    refused(name, Settings.read, {name: number})


@pytest.mark.parametrize("number", NUMBERS)
def test_a_deadline_of_a_prefetch_out_of_range_is_one_error(number):
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    with Executor(manager, open_pools(SHAPE, tiers, SIZE)) as executor:
        refused("deadline_s", executor.prefetch, [1], deadline_s=number)


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        (("gpu", "remote"), "tier 'remote' exchanges bytes with 'host', which is missing"),
        (("gpu", "host", "remote", "remote"), "gpu, host, disk, remote, each at most once"),
    ],
)
def test_tiers_that_cannot_be_neighbours_are_one_error(kinds, why):
    tiers = [Tier(kind, blocks=4) for kind in kinds]
    refused(why, BlockManager, SHAPE, tiers, block_tokens=SIZE)


@pytest.mark.parametrize("kind", ["gpu", "host", "disk"])
@pytest.mark.parametrize(
    "more", [{"write_limit": 9}, {"trust_s": 1}, {"lookup": "all"}, {"secret_file": "x"}]
)
def test_a_setting_of_a_remote_tier_on_another_is_one_error(kind, more):
    refused(f"is given of tier '{kind}': only a remote tier", Tier, kind, blocks=4, **more)


def test_a_missing_bucket_and_a_wrong_password_are_one_error(place):
    pytest.importorskip("obstore")
    pytest.importorskip("redis")
    with GcsServer() as server:
        refused("no such bucket", opened, GcsServer.url(server.port, "none"))
    with RespServer("right") as server:
        url = f"redis://:hunter2@127.0.0.1:{server.port}/0"
        refused("the password was refused", opened, url)
    assert not (place / "kv").exists()


def test_a_certificate_of_another_authority_is_one_error(tmp_path):
    pytest.importorskip("redis")
    files = store_servers.certificates(tmp_path / "a")
    foreign = store_servers.certificates(tmp_path / "b") / "ca.pem"
    with store_servers.redis_tls(tmp_path / "server", files) as server:
        refused("certificate", opened, f"rediss://localhost:{server.port}/0?ca={foreign}")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://host/0", "at most 536870912 fit a Redis value"),
        ("s3://kv", "at most 5368709120 fit an object"),
    ],
)
def test_a_block_above_the_limit_of_a_value_is_one_error(url, why):
    from kvtrie.tiers.remote import RemoteStorage

    pytest.importorskip("obstore")
    pytest.importorskip("redis")
    huge = ModelShape(layers=160, kv_heads=128, head_dim=128, fingerprint="huge")
    refused(why, RemoteStorage, url, huge, 1024)


@pytest.mark.parametrize("strict", [False, True])
def test_a_store_that_is_not_there_is_a_warning_unless_strict(strict, caplog):
    pytest.importorskip("redis")
    url = f"redis://:hunter2@127.0.0.1:{store_servers.free_port()}/0"
    if strict:
        refused("is unreachable", opened, f"{url}?strict=1")
        return
    assert opened(url)[2].breaker.state == "open"
    assert "is unreachable, a probe follows" in caplog.text
    assert "hunter2" not in caplog.text
