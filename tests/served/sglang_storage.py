"""Our disk as SGLang's `dynamic` HiCache storage: bounded, proved, found after a restart."""

from __future__ import annotations

import benches.peers.stand_ins  # noqa: F401 # isort: skip - without it sglang does not load

import importlib.util
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hicache import PAGE, HostPool, StatePool, Updater, config, indices, opened, served_model
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from kvtrie.engines.sglang import storage as storage_module
from kvtrie.engines.sglang import weights
from kvtrie.engines.sglang.weights import UPDATES
from kvtrie.errors import ConfigError
from kvtrie.tiers.keyed_disk import KeyedDisk


@pytest.fixture(autouse=True)
def model(monkeypatch):
    """A model in this process, as SGLang's workers have one."""
    return served_model(monkeypatch)


def test_pages_go_and_come_and_are_found_after_a_restart(tmp_path):
    pool, storage = HostPool(), opened(tmp_path)
    keys = [f"hash {at}" for at in range(8)]
    info = HiCacheStorageExtraInfo(prefix_keys=keys[:4])
    storage.mem_pool_host = pool
    assert storage.batch_set_v1(keys[:4], indices(range(4))) == [True] * 4
    assert storage.batch_set_v1(keys[4:], indices(range(4, 8)), info) == [True] * 4
    assert storage.batch_exists([*keys, "another"]) == 8
    storage.close()
    again = opened(tmp_path)
    right, again.mem_pool_host.kv = pool.kv.clone(), torch.zeros_like(pool.kv)
    assert again.batch_get_v1([*keys, "another"], indices(range(9))) == [True] * 8 + [False]
    assert (again.mem_pool_host.kv[:, :, : 8 * PAGE] == right[:, :, : 8 * PAGE]).all()
    assert (again.mem_pool_host.kv[:, :, 8 * PAGE :] == 0).all()
    page = again.get(keys[3], again.mem_pool_host.get_dummy_flat_data_page())
    assert (page == pool.get_data_page(3 * PAGE)).all()
    again.close()
    elsewhere = opened(tmp_path, model_name="another path of the same weights")
    assert elsewhere.exists(keys[0])
    elsewhere.close()


def test_the_first_rank_logs_the_disk_of_the_server(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(storage_module._LOG, "info", lambda line, *more: lines.append(line % more))
    storage = opened(tmp_path)
    assert storage.set("a", HostPool().get_data_page(0))
    assert storage.set("b", HostPool().get_data_page(8))
    storage.close()
    lines.clear()
    opened(tmp_path, tp_size=2, extra={"blocks": None, "bytes": "2MB"}).close()
    (line,) = [one for one in lines if one.startswith("kvtrie: disk")]
    assert "; block 8 tokens; 2 ranks" in line
    assert "0 % filled by an earlier run;" in line
    slots = KeyedDisk(
        tmp_path / "half", meaning="x", size=2 * 3 * PAGE * 4 * 2, bytes=1_000_000
    ).store.slots
    assert f"= {slots * PAGE:,} tokens".replace(",", " ") in line
    lines.clear()
    opened(tmp_path, tp_rank=1, tp_size=2).close()
    assert not [one for one in lines if "disk" in one]
    opened(tmp_path).close()
    assert "16 % filled by an earlier run;" in lines[-1]  # 2 of 12 pages


def test_kept_memory_is_found_after_a_restart(model, monkeypatch):
    lines = []
    monkeypatch.setattr(storage_module._LOG, "info", lambda line, *more: lines.append(line % more))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        keep = {"path": None, "keep": f"{folder}/kv"}
        pool, storage = HostPool(), opened("", extra=keep)
        assert storage.batch_set_v1(["a", "b"], indices(range(2))) == [True] * 2
        storage.close()
        again = opened("", extra=keep)
        assert f", kept in {folder}/kv, 16 % filled by an earlier run" in lines[-1]
        right, again.mem_pool_host.kv = pool.kv.clone(), torch.zeros_like(pool.kv)
        assert again.batch_get_v1(["a", "b", "c"], indices(range(3))) == [True, True, False]
        assert (again.mem_pool_host.kv[:, :, : 2 * PAGE] == right[:, :, : 2 * PAGE]).all()
        again.close()
        model.scale[0] = 2
        with pytest.raises(ConfigError, match="keep_replace"):
            opened("", extra=keep)
        opened("", extra=keep | {"keep_replace": True}).close()


def test_pages_of_other_weights_are_not_found(tmp_path, model):
    storage = opened(tmp_path)
    assert storage.set("a", HostPool().get_data_page(0))
    storage.close()
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        bits = tensor.detach().view(torch.int32).view(-1)
        bits[-1] ^= 1 << 3
        storage = opened(tmp_path)
        assert not storage.exists("a")
        storage.close()
        bits[-1] ^= 1 << 3
    storage = opened(tmp_path)
    assert storage.exists("a")
    storage.close()


def test_pages_of_another_format_layout_or_rank_are_not_found(tmp_path):
    """All have pages of equal length, so that no length gives a mistake away."""

    class Halves(HostPool):
        def __init__(self):
            super().__init__()
            self.kv = self.kv.view(torch.float16)

        def get_dummy_flat_data_page(self):
            return super().get_dummy_flat_data_page().view(torch.float16)

    class PageFirst(HostPool):
        layout = "page_first"

    ways = [
        (HostPool, {}),
        (Halves, {}),
        (PageFirst, {}),
        (HostPool, {"tp_size": 2}),
        (HostPool, {"tp_size": 2, "tp_rank": 1}),
        (HostPool, {"pp_size": 2}),
    ]
    for at, (pool, ranks) in enumerate(ways):
        storage = opened(tmp_path, pool(), **ranks)
        assert not storage.exists("a")
        page = pool().get_data_page(at * PAGE)
        assert storage.set("a", page)
        storage.close()
    for at, (pool, ranks) in enumerate(ways):
        storage = opened(tmp_path, pool(), **ranks)
        found = storage.get("a", pool().get_dummy_flat_data_page())
        assert torch.equal(
            found.view(torch.int16), pool().get_data_page(at * PAGE).view(torch.int16)
        )
        storage.close()


def test_adapters_of_the_command_line_count_by_their_files(tmp_path, monkeypatch):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    monkeypatch.setattr(weights, "_paths", lambda: [str(adapter)])
    storage = opened(tmp_path / "kv")
    assert storage.set("a", HostPool().get_data_page(0))
    storage.close()
    for content, stored in ((b"two", False), (b"one", True)):
        (adapter / "adapter_model.safetensors").write_bytes(content)
        storage = opened(tmp_path / "kv")
        assert storage.exists("a") == stored
        storage.close()


@pytest.mark.parametrize("update", UPDATES)
def test_after_an_update_in_place_nothing_is_found_or_written(tmp_path, update):
    page = HostPool().get_data_page(0)
    storage = opened(tmp_path)
    assert storage.set("a", page)
    assert getattr(Updater(), update)("answer") == "answer"
    assert not storage.exists("a")
    assert storage.get("a", HostPool().get_dummy_flat_data_page()) is None
    assert not storage.set("b", page)
    storage.close()
    again = opened(tmp_path)
    assert again.exists("a")
    assert not again.exists("b")
    again.close()


def test_the_older_interface_does_the_same(tmp_path):
    pool, storage = HostPool(), opened(tmp_path)
    data = [pool.get_data_page(at * PAGE) for at in range(3)]
    assert storage.batch_set(["a", "b", "c"], data)
    assert storage.set("d", data[0])
    got = storage.batch_get(["a", "x", "c"], [pool.get_dummy_flat_data_page() for _ in range(3)])
    assert got[1] is None
    assert (got[0] == data[0]).all()
    assert (got[2] == data[2]).all()
    storage.clear()
    assert not storage.exists("a")
    storage.close()


def test_it_is_bounded_and_beginnings_stay(tmp_path):
    storage = opened(tmp_path)
    for chain in range(10):
        keys = [f"{chain} {at}" for at in range(4)]
        assert storage.batch_set_v1(keys, indices(range(4))) == [True] * 4
        assert len(storage.pages) <= 12
    for chain in range(10):
        found = [storage.exists(f"{chain} {at}") for at in range(4)]
        assert found == sorted(found, reverse=True)
    storage.close()


def test_a_damaged_page_is_a_miss(tmp_path):
    storage = opened(tmp_path)
    keys = [f"{at}" for at in range(12)]
    storage.batch_set_v1(keys, indices(range(12)))
    storage.close()
    (data,) = [
        each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size > 40000
    ]
    raw = bytearray(data.read_bytes())
    for at in range(10, len(raw), 1500):
        raw[at] ^= 16
    data.write_bytes(raw)
    pool = HostPool()
    right = pool.kv.clone()
    storage = opened(tmp_path, pool)
    loaded = storage.batch_get_v1(keys, indices(range(12)))
    assert not all(loaded)
    assert (pool.kv == right).all()
    storage.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"extra": {"path": ""}}, "needs a path"),
        ({"extra": {"room": 3}}, "the storage has no 'room'"),
        ({"extra": {"blocks": 1.5}}, "blocks is 1.5"),
        ({"is_mla_model": True, "tp_size": 2}, "latent KV of 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, **more)


def test_a_key_that_is_no_text_is_a_miss(tmp_path):
    storage = opened(tmp_path)
    for key in ("\ud800", 5, None):
        assert not storage.exists(key)
        assert storage.get(key) is None
        assert storage.batch_set_v1([key], indices([0])) == [False]
        assert storage.batch_get_v1([key], indices([0])) == [False]
    assert storage.batch_set_v1(["good"], indices([0])) == [True]
    assert storage.exists("good")
    assert storage.boundary.failures == 12
    storage.close()


@pytest.mark.parametrize("name", ["draft", "draft_swa", "deepseek_v4_c4_state"])
def test_pools_that_are_not_kept_are_refused_at_start(tmp_path, name):
    with pytest.raises(ConfigError, match=f"SGLang has a pool '{name}'"):
        opened(tmp_path, others={PoolName.KV: HostPool(), PoolName(name): HostPool()})
    opened(tmp_path).close()  # the folder was given back


def test_a_pool_that_comes_after_the_start_is_refused(tmp_path):
    storage = opened(tmp_path)
    storage.register_mem_host_pool_v2(storage.mem_pool_host, PoolName.KV)
    with pytest.raises(ConfigError, match="known when the server starts"):
        storage.register_mem_host_pool_v2(StatePool(), PoolName.MAMBA)


def trailing(name, keys, rows=None):
    return PoolTransfer(name, rows, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


KEYS = [f"hash {at}" for at in range(12)]


def test_states_and_windows_are_found_after_a_restart(tmp_path):
    others = {PoolName.SWA: HostPool(), PoolName.MAMBA: StatePool()}
    others[PoolName.SWA].kv += 1
    storage = opened(tmp_path, others=others)
    right = [pool.get_data_page(0).clone() for pool in others.values()]
    assert all(storage.batch_set_v1(KEYS[:8], indices(range(8))))
    window = trailing(PoolName.SWA, KEYS[2:4], indices([0, 1]))
    states = trailing(PoolName.MAMBA, [KEYS[3], KEYS[7]], torch.tensor([0, 5]))
    assert storage.batch_set_v2([window, states]) == {
        PoolName.SWA: [True] * 2,
        PoolName.MAMBA: [True] * 2,
    }
    storage.close()
    others = {PoolName.SWA: HostPool(), PoolName.MAMBA: StatePool()}
    again = opened(tmp_path, others=others)
    asked = [trailing(PoolName.SWA, KEYS[:2]), trailing(PoolName.MAMBA, KEYS[:1])]
    found = again.batch_exists_v2(KEYS, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {
        PoolName.KV: 8,
        PoolName.SWA: 4,
        PoolName.MAMBA: 8,
    }
    others[PoolName.MAMBA].states[9] = 0
    window = trailing(PoolName.SWA, KEYS[2:4], indices([6, 7]))
    states = trailing(PoolName.MAMBA, [KEYS[3], KEYS[4]], torch.tensor([9, 1]))
    assert again.batch_get_v2([window, states]) == {
        PoolName.SWA: [True] * 2,
        PoolName.MAMBA: [True, False],
    }
    assert (others[PoolName.SWA].get_data_page(6 * PAGE) == right[0]).all()
    assert (others[PoolName.MAMBA].get_data_page(9) == right[1]).all()
    again.close()


@pytest.mark.parametrize("url", [False, True])
def test_borders_are_those_that_sglangs_own_files_have(tmp_path, url):
    """Random pages of three pools: the same answer as SGLang's `HiCacheFile` at every question."""
    draw, names = random.Random(url), [PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER]
    pools = {name: StatePool() if name == "mamba" else HostPool() for name in names}
    # A belief about the store is used for a minute, and here nobody else writes.
    place = f"folder:{tmp_path}/ours" if url else tmp_path / "ours"
    ours = opened(place, others=pools, extra={} if url else {"blocks": 200})
    theirs = HiCacheFile(config("none"), str(tmp_path / "theirs"))
    theirs.register_mem_pool_host(ours.mem_pool_host)
    for name, pool in {PoolName.KV: ours.mem_pool_host, **pools}.items():
        theirs.register_mem_host_pool_v2(pool, name)
    for turn in range(25):
        keys = [f"{turn} {at}" for at in range(draw.randint(1, 12))]
        for name in [PoolName.KV, *names]:
            stored = [key for key in keys if draw.random() < 0.8]
            size = 1 if name == "mamba" else PAGE
            wanted = PoolTransfer(name, torch.arange(len(stored) * size), keys=stored)
            for one in (ours, theirs):
                assert one.batch_set_v2([wanted])[name] == [True] * len(stored)
        asked = [
            trailing(PoolName.SWA, keys[: draw.randint(1, 3)]),
            trailing(PoolName.MAMBA, keys[:1]),
            PoolTransfer(PoolName.INDEXER),
        ]
        asked = draw.sample(asked, draw.randint(0, 3))
        mine, other = ours.batch_exists_v2(keys, asked), theirs.batch_exists_v2(keys, asked)
        assert mine.kv_hit_pages == other.kv_hit_pages
        assert mine.restorable_prefix_pages == other.restorable_prefix_pages
        # The other one stops at the first pool that leaves no length.
        assert other.extra_pool_hit_pages.items() <= mine.extra_pool_hit_pages.items()
    ours.close()


def test_pools_share_one_budget(tmp_path):
    states = StatePool()
    storage = opened(
        tmp_path, others={PoolName.MAMBA: states}, extra={"blocks": None, "bytes": "1200KB"}
    )
    for turn in range(40):
        keys = [f"{turn} {at}" for at in range(8)]
        assert all(storage.batch_set_v1(keys, indices(range(8))))
        states_of = trailing(PoolName.MAMBA, keys, torch.arange(8))
        assert all(storage.batch_set_v2([states_of])[PoolName.MAMBA])
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= 1_200_000
    found = storage.batch_exists_v2(keys, [trailing(PoolName.MAMBA, keys[:1])])
    assert found.kv_hit_pages == 8
    storage.close()


def test_a_damaged_state_is_a_miss(tmp_path):
    storage = opened(tmp_path, others={PoolName.MAMBA: StatePool()})
    assert storage.batch_set_v1(KEYS[:1], indices([0])) == [True]
    state = trailing(PoolName.MAMBA, KEYS[:1], torch.tensor([3]))
    assert storage.batch_set_v2([state]) == {PoolName.MAMBA: [True]}
    pattern = StatePool().states[3].numpy().tobytes()
    (file,) = [f for f in tmp_path.rglob("*") if f.is_file() and pattern in f.read_bytes()]
    data = file.read_bytes()
    with file.open("r+b") as stream:
        stream.seek(data.index(pattern) + 7)
        stream.write(b"!")
    assert storage.batch_get_v2([state]) == {PoolName.MAMBA: [False]}
    assert storage.batch_exists_v2(KEYS[:1], [state]).kv_hit_pages == 0
    assert storage.batch_exists(KEYS[:1]) == 1
    storage.close()


def test_rows_that_do_not_go_with_the_keys_are_not_moved(tmp_path):
    storage = opened(tmp_path, others={PoolName.MAMBA: StatePool()})
    for rows in (None, torch.tensor([1]), torch.arange(3)):
        state = trailing(PoolName.MAMBA, KEYS[:2], rows)
        assert storage.batch_set_v2([state]) == {PoolName.MAMBA: [False] * 2}
        assert storage.batch_get_v2([state]) == {PoolName.MAMBA: [False] * 2}
    assert storage.batch_exists_v2(KEYS, [state]).kv_hit_pages == 0
    storage.close()


def test_a_real_pool_has_what_the_storage_uses():
    """The names of SGLang's own host pools that the storage uses."""
    spec = importlib.util.find_spec("sglang.srt.mem_cache.pool_host.base")
    source = Path(spec.origin).read_text()
    for name in ("get_dummy_flat_data_page", "get_data_page", "set_from_flat_data_page"):
        assert f"def {name}(" in source
    root = Path(spec.origin).parents[3]
    updater = root.joinpath(*weights._UPDATER.split(".")[1:]).with_suffix(".py").read_text()
    for name in UPDATES:
        assert f"    def {name}(self, " in updater.replace("(\n        self,", "(self, ")
