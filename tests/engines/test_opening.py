"""`open` for transformers: four lines give what forty gave, and a restart finds the blocks."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from event_readers import Subscriber, VllmReader
from kept import memory_folder
from tinymodels import some

from kvtrie import ResumePoints, Scope
from kvtrie.cluster import Publisher
from kvtrie.demo.families import VOCABULARY, family
from kvtrie.engines import transformers
from kvtrie.engines.transformers import KvtrieCache
from kvtrie.errors import ClosedError, ConfigError, KvtrieError
from kvtrie.tiers import KeptPool, agreement

IDS = some(1, 1, 40)
FAMILY = "qwen3-next"
ANY = "tcp://127.0.0.1:0"
OF_ALL = IDS % VOCABULARY  # tokens of any model here
SIZES = {"host": "2MB", "gpu": "1MB", "block_tokens": 8}
IN_CHILD = (
    f"import sys; sys.path[:] = {[str(Path(__file__).parent), *sys.path]!r}\n"
    "import conftest\n"
    "from test_opening import OF_ALL, SIZES, answer, family, transformers\n"
    "model = conftest.tiny_llama()\n"
)


def answer(model, kv, ids=IDS, **more):
    """Tokens that a model generates over tiers, and the tokens that it found."""
    with kv.cache(ids, reserve=8, **more) as cache:
        assert isinstance(cache, KvtrieCache)
        found = cache.get_seq_length()
        tokens = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    return tokens[0, ids.shape[1] :].tolist(), found


@pytest.fixture
def plain(llama):
    """The tokens without a cache of ours."""
    return llama.generate(IDS, max_new_tokens=8, do_sample=False)[0, IDS.shape[1] :].tolist()


def test_a_restart_finds_the_blocks_that_leaving_has_saved(llama, plain, tmp_path, capfd):
    disk = f"{tmp_path}/kv:20MB"
    with transformers.open(llama, disk=disk, **SIZES) as kv:
        assert answer(llama, kv) == (plain, 0)
        assert answer(llama, kv) == (plain, 32)  # the last token's block is computed
    first = capfd.readouterr().err
    assert first.count("\n") == 1
    assert first.startswith("kvtrie: gpu ")
    assert ", 0 % filled by an earlier run; block 8 tokens; 1 rank; policy learned\n" in first
    with transformers.open(llama, disk=disk, **SIZES) as kv:
        stats = kv.executor.manager.stats().tiers["disk"]
        assert stats.slots - stats.free >= 5
        # The plan computes blocks of a model as small as this, so the loads are asked for.
        lease = kv.executor.manager.acquire(
            IDS[0].numpy(), now=kv.executor.clock(), load="all", keep=1
        )
        assert lease.matched == 32
        lease.release()
    assert f", {100 * (stats.slots - stats.free) // stats.slots} % filled" in capfd.readouterr().err


def test_leaving_saves_and_closes_after_an_exception_too(llama, tmp_path):
    disk = f"{tmp_path}/kv:20MB"
    kv = transformers.open(llama, disk=disk, **SIZES)
    with pytest.raises(ZeroDivisionError), kv:
        _ = answer(llama, kv)[1] / 0
    with pytest.raises(ClosedError, match="are closed"):
        kv.cache(IDS)
    kv.close()
    with transformers.open(llama, disk=disk, **SIZES) as again:
        stats = again.executor.manager.stats().tiers["disk"]
        assert stats.slots - stats.free >= 5


def test_without_a_disk_and_with_a_scope(llama, plain):
    with transformers.open(llama, scope=Scope(tenant=b"a"), policy="lru", **SIZES) as kv:
        assert answer(llama, kv)[0] == plain
        assert answer(llama, kv, sessions=["chat"])[1] == 32
        assert not kv.executor.manager.lookup(IDS[0].numpy(), now=0).tokens
        assert list(kv.executor.manager.stats().tiers) == ["gpu", "host"]
        assert kv.executor.manager.stats().tiers["gpu"].policy == "lru"
    with transformers.open(llama, host=None, gpu="1MB") as kv:
        assert list(kv.executor.manager.stats().tiers) == ["gpu"]


def test_the_first_tier_has_a_quarter_of_the_free_memory_of_the_device(llama, monkeypatch):
    monkeypatch.setattr("kvtrie.engines.transformers.opening.free_memory", lambda: 8_000_000)
    with transformers.open(llama, host="1MB") as kv:
        tier = kv.executor.manager.tiers[0]
        assert tier.room(kv.executor.manager.model, 16) == tier.bytes // (
            kv.executor.manager.model.block_bytes(16)
        )
        assert tier.bytes == 2_000_000


def test_wrong_values_are_refused_and_leave_the_folder_free(llama, tmp_path):
    disk = f"{tmp_path}/kv:20MB"
    for wrong, message in (
        ({"host": "8G"}, "the units are"),
        ({"disk": "kv"}, "disk is 'kv', PATH:SIZE wanted"),
        ({"gpu": "0%"}, "gpu is '0%'"),
        ({"policy": "best"}, "best"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"host": "3B"}, "tier 'host' has 3 bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            transformers.open(llama, **{**SIZES, "disk": disk, **wrong})
    with pytest.raises(ConfigError, match="model is 7"):
        transformers.open(7)
    kv = transformers.open(llama, disk=disk, **SIZES)
    with kv, pytest.raises(ConfigError, match="cannot be written"):
        transformers.open(llama, disk=disk, **SIZES)
    transformers.open(llama, disk=disk, **SIZES).close()


EXTREMES = {
    "host": [0, -1, "", "0B", 0.5, True, "9EB", "101%", "0%", 2**63, "9" * 5000 + "GB", [], "8"],
    "gpu": [0, -1, "", "0B", 0.5, True, "9EB", "101%", 2**63, [], "1"],
    "disk": [0, "", ":", "kv", "kv:", ":1GB", "kv:0B", "file:///kv#a:1GB", "kv\0:1GB", []],
    "keep": [0, "", "a\0b", "s3://b", []],
    "remote": [
        0,
        "",
        "kv",
        "folder:",
        "folder:/kv#1",
        "folder:/kv?x=1",
        "folder:/a%zz",
        "x:" * 9,
        [],
    ],
    "block_tokens": [0, -1, 2**32, 0.5, True, None, "16", []],
    "policy": [0, "", "x", None, []],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in EXTREMES.items() for value in values],
    ids=lambda value: repr(value)[:24],
)
def test_extremes_are_refused_and_nothing_is_made(llama, tmp_path, monkeypatch, name, value):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvtrieError):
        transformers.open(llama, **SIZES | {name: value})
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_fit_one_by_one_and_not_together_are_refused(llama, monkeypatch):
    monkeypatch.setattr(agreement, "all_of_device", lambda _: 3 * 2**20)
    with pytest.raises(ConfigError, match=r"tiers gpu and host together takes 4188160 .* 3145728"):
        transformers.open(llama, host="2MiB", gpu="2MiB", block_tokens=8)
    transformers.open(llama, host="1MiB", gpu="1MiB", block_tokens=8).close()


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_memory_that_the_process_may_not_have_is_refused_with_its_tier(llama):
    with Path("/proc/self/status").open() as rows:
        size = next(int(row.split()[1]) << 10 for row in rows if row.startswith("VmSize:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), hard))
    try:
        with pytest.raises(
            ConfigError, match=r"tier 'host': \d+ bytes of memory on cpu for \d+ slots"
        ):
            transformers.open(llama, host="2GB", gpu="1MB", block_tokens=8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_two_processes_share_a_store(llama, plain, tmp_path, capfd):
    url = f"folder:{tmp_path}/kv"
    code = IN_CHILD + (
        f"with transformers.open(model, remote={url!r}, **SIZES) as kv:\n"
        "    print(answer(model, kv, lookup_s=30.0))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed == f"{(plain, 0)}\n"
    with transformers.open(llama, remote=url, **SIZES) as kv:
        assert f"; remote {url}; block 8 tokens" in capfd.readouterr().err
        store = kv.executor.pools[2]
        assert answer(llama, kv, lookup_s=30.0) == (plain, 32)
        kv.executor.drain()  # the plan may compute blocks of a model this small before they load
        assert store.stats().results["get", "ok"] >= 4
        (tmp_path / "kv").rename(tmp_path / "away")
        assert answer(llama, kv, ids=some(7, 1, 40), lookup_s=30.0)[1] == 0
    assert store.read_many([(bytes(32), 0, (0, 5), torch.zeros(5, 4096, dtype=torch.uint8))]) == [
        "unreachable: closed"
    ]
    with pytest.raises(ConfigError, match=r"remote is 'redis://:\*\*\*@a', and host is None"):
        transformers.open(llama, remote="redis://:hunter2@a", host=None)
    with pytest.raises(ConfigError, match="'folder:kv' is a folder"):
        transformers.open(llama, remote="kv", **SIZES)


def test_the_model_has_no_hooks_left(llama):
    with transformers.open(llama, **SIZES) as kv:
        answer(llama, kv)
    assert not any(module._forward_pre_hooks for module in llama.modules())
    assert torch.is_grad_enabled()


def test_kept_host_memory_is_found_after_a_restart(llama, plain, capfd, caplog):
    with memory_folder() as folder:
        keep = str(folder / "kv")
        with transformers.open(llama, keep=keep, **SIZES) as kv:
            assert answer(llama, kv) == (plain, 0)
            with transformers.open(llama, keep=keep, **SIZES) as second:
                assert answer(llama, second) == (plain, 0)
            assert "starts with a pool of its own" in caplog.text
        assert f", kept in {keep}, 0 % filled by an earlier run; " in capfd.readouterr().err
        with transformers.open(llama, keep=keep, **SIZES) as kv:
            assert isinstance(kv.executor.pools[1], KeptPool)
            ids = IDS[0].numpy()
            lease = kv.executor.manager.acquire(ids, now=kv.executor.clock(), load="all", keep=1)
            assert lease.matched == 32
            kv.executor.wait(lease)
            lease.release()
            assert answer(llama, kv) == (plain, 32)
            assert not kv.executor.pools[1].lost_blocks
        with pytest.raises(ConfigError, match="there is no host memory to keep"):
            transformers.open(llama, keep=keep, host=None)


@pytest.mark.parametrize("groups", [pytest.param(False, marks=pytest.mark.deep), True])
def test_a_process_that_is_killed_has_kept_all_blocks_that_it_committed(groups, llama):
    model = family(FAMILY) if groups else llama
    with memory_folder() as folder:
        keep = str(folder / "kv")
        code = (
            IN_CHILD
            + (f"model = family({FAMILY!r})\n" if groups else "")
            + f"kv = transformers.open(model, keep={keep!r}, **SIZES)\n"
            "answer(model, kv, OF_ALL)\n"
            "kv.executor.drain()\n"
            "host = kv.executor.manager.stats().tiers['host']\n"
            "pool, free = kv.executor.pools[1], host.slots - host.free\n"
            "blocks = sum(one.held + one.released for one in host.groups) or free\n"
            "while pool.kept_blocks < blocks:\n"
            "    kv.executor.poll()\n"
            "print(flush=True)\n"
            "sys.stdin.read()\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with child:
            assert child.stdout.readline() == "\n"
            child.kill()
        with transformers.open(model, keep=keep, **SIZES) as kv:
            ids = model.generate(OF_ALL, max_new_tokens=8, do_sample=False)[0].numpy()
            assert kv.executor.manager.lookup(ids, now=kv.executor.clock()).tokens == 40
            assert not kv.executor.manager.lookup(ids[1:], now=kv.executor.clock()).tokens


def resident():
    """Bytes of memory that the process has."""
    with Path("/proc/self/smaps_rollup").open() as rows:
        return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Rss:"))


@pytest.mark.grid
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("groups", [False, True])
def test_leaving_gives_the_memory_of_all_tiers_back(groups, kept, llama):
    model, resume = (family("gemma-3"), ResumePoints()) if groups else (llama, None)
    with memory_folder() as folder:
        keep = f"{folder}/kv" if kept else None
        gc.collect()
        before = resident()
        kv = transformers.open(
            model, gpu="40MB", host="60MB", block_tokens=8, keep=keep, resume=resume
        )
        with kv, kv.cache(OF_ALL, reserve=8) as cache:
            assert resident() - before > 95_000_000
            model.generate(OF_ALL, past_key_values=cache, max_new_tokens=2, do_sample=False)
        gc.collect()
        assert resident() - before < 20_000_000
        maps = Path("/proc/self/maps").read_text()
        assert str(folder) not in maps
    for pool in kv.executor.pools:
        for one in (pool, *getattr(pool, "groups", ())):
            with pytest.raises(ClosedError, match=r"closed: open"):
                _ = one.device
            one.close()
    with pytest.raises(ClosedError, match="are closed"):
        kv.cache(OF_ALL)
    with pytest.raises(ClosedError, match=r"closed: open"):
        KvtrieCache(model, kv.executor, OF_ALL)


def test_the_blocks_are_published_where_events_are_wanted(llama):
    with transformers.open(llama, events=ANY, replay=ANY, **SIZES) as kv:
        publisher = kv.publisher
        answer(llama, kv)
        with Subscriber(VllmReader(), publisher.endpoint, publisher.replay) as subscriber:
            assert subscriber.reader.counts(IDS[0].tolist(), "GPU") == 40
            assert publisher.counts.stored == 5
    with pytest.raises(ClosedError):
        publisher.pump()
    with transformers.open(llama, **SIZES) as kv:
        assert kv.publisher is None
        with pytest.raises(ConfigError, match="events_of='residency'"):
            KvtrieCache(llama, kv.executor, IDS, events=ANY)
    with pytest.raises(ConfigError, match="nothing is published"):
        transformers.open(llama, replay=ANY, **SIZES)
    with pytest.raises(ConfigError, match="public=True"):
        transformers.open(llama, events="tcp://*:0", **SIZES)


def test_a_cache_publishes_the_blocks_of_its_manager_until_it_is_closed(llama):
    with transformers.open(llama, events=ANY, **SIZES) as kv:
        kv.publisher.close()
        with KvtrieCache(llama, kv.executor, IDS, reserve=8, events=ANY) as cache:
            endpoint = cache._events.endpoint
            llama.generate(IDS, past_key_values=cache, max_new_tokens=8, do_sample=False)
            assert cache._events.counts.stored == 5
        with Publisher(kv.executor.manager, endpoint) as publisher:
            with KvtrieCache(llama, kv.executor, IDS, events=publisher):
                pass
            publisher.pump()
        with pytest.raises(ConfigError, match="events"):
            KvtrieCache(llama, kv.executor, IDS, events=7)
        assert kv.executor.manager.stats().leases == 0
