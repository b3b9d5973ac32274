"""A host tier that outlives its process: what is found again, and what is a miss."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from keeping import SHAPE, SIZE, ask, prompt
from kept import ENTRY, HEADER, MEMORY, flip, kept_serving, memory_folder

from kvtrie import BlockManager, Layout, Tier
from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers import KeptPool, Recalled, open_pools
from kvtrie.tiers.kept_tier import kept_pool
from kvtrie.transfer import Executor

PROMPTS = [prompt(seed, 2) for seed in range(6)]
BLOCKS = 2 * len(PROMPTS)
KILLS = Path(__file__).with_name("kept_kills.py")


@pytest.fixture
def path():
    """A path for a kept file."""
    with memory_folder() as folder:
        yield folder / "pool"


@pytest.fixture
def kept(path):
    """The path of a kept file with all prompts."""
    fill(path)
    return path


def fill(path, **settings):
    with kept_serving(path, **settings) as executor:
        for tokens in PROMPTS:
            ask(executor, tokens)
        executor.save()


def cached(path, **settings):
    """Tokens of each prompt that the next process finds, and the blocks that were lost."""
    with kept_serving(path, **settings) as executor:
        executor.restore()
        found = [ask(executor, tokens) for tokens in PROMPTS]
        return found, dict(executor.pools[1].lost_blocks)


def test_the_next_process_finds_every_block(path):
    fill(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with kept_serving(path) as executor:
        host = executor.pools[1]
        assert isinstance(host, KeptPool)
        assert isinstance(host, Recalled)
        assert host.file.unverified == BLOCKS
        assert executor.restore() == BLOCKS
        assert [ask(executor, tokens) for tokens in PROMPTS] == [2 * SIZE] * len(PROMPTS)
        assert host.file.unverified == 0
        assert host.kept_blocks == BLOCKS
        assert not host.lost_blocks


def test_memory_is_allocated_when_the_file_is_made(path):
    with kept_serving(path) as executor:
        wanted = sum(plane.nbytes for plane in executor.pools[1].planes)
        assert 512 * path.stat().st_blocks >= wanted + 16 * ENTRY


def test_without_keep_memory_has_no_file(path):
    pools = open_pools(SHAPE, [Tier("gpu", blocks=4), Tier("host", blocks=4)], SIZE)
    assert not isinstance(pools[1], KeptPool)
    assert not path.exists()


def test_a_block_that_was_not_sealed_is_lost(kept):
    with kept_serving(kept) as executor:
        executor.restore()
        host = executor.pools[1]
        host.begin(np.array([3]), [bytes(32)], (0, SHAPE.layers))
    found, lost = cached(kept)
    assert sum(found) == 2 * SIZE * len(PROMPTS) - SIZE * (1 + (found.count(0) > 0))
    assert lost == {"torn": 1}


def test_a_killed_process_leaves_what_it_sealed(path):
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(KILLS.parents[1])!r})
        from keeping import ask, prompt
        from kept import kept_serving
        with kept_serving({str(path)!r}) as executor:
            for seed in range({len(PROMPTS)}):
                ask(executor, prompt(seed, 2))
            executor.flush()
            host = executor.pools[1]
            while host.sealable or host.kept_blocks < {BLOCKS}:
                host.seal()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=False, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL
    assert cached(path) == ([2 * SIZE] * len(PROMPTS), {})


def test_kills_at_random_points_lose_nothing_that_was_sealed(path):
    assert kill(path, 6)["kills"] == 6


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_kills_lose_nothing_that_was_sealed(path, seed):
    assert kill(path, 1000, seed)["kills"] == 1000


def kill(path, times, seed=10):
    ended = subprocess.run(
        [sys.executable, str(KILLS), str(path), str(times), str(seed)],
        check=True,
        capture_output=True,
        text=True,
    )
    counts = json.loads(ended.stdout)
    sys.stdout.write(ended.stdout)
    assert counts["wrong"] == 0
    assert counts["found"] >= 0.99 * counts["sealed"] > 0
    return counts


@pytest.mark.parametrize("part", ["header", "table", "pool"])
def test_a_flipped_bit_is_a_miss(kept, part):
    whole = kept.read_bytes()
    pool = len(whole) - 16 * SHAPE.block_bytes(SIZE)
    spans = {"header": (0, HEADER), "table": (HEADER, pool), "pool": (pool, len(whole))}
    draw = np.random.default_rng(7)
    misses = 0
    for at in draw.integers(*spans[part], 10).tolist():
        kept.write_bytes(whole)
        flip(kept, at, int(draw.integers(8)))
        try:
            found, _ = cached(kept)  # compares the bytes of what is found
        except ConfigError:  # the first eight bytes: it is no kept file then
            assert at < 8
            continue
        misses += sum(found) < 2 * SIZE * len(PROMPTS)
    assert misses or part == "header"


def test_damage_is_counted_and_the_rest_is_found(kept):
    whole = kept.read_bytes()
    pool = len(whole) - 16 * SHAPE.block_bytes(SIZE)
    with kept_serving(kept) as executor:
        executor.restore()
        slots = [
            int(executor.manager.lookup(tokens, now=0, keep=0).blocks[1].copies[-1].slots[0])
            for tokens in PROMPTS[:2]
        ]
    flip(kept, pool + slots[0] * SHAPE.block_bytes(SIZE) + 11)
    flip(kept, HEADER + slots[1] * ENTRY + 100)
    found, lost = cached(kept)
    assert lost == {"checksum": 1, "entry": 1}
    assert found == [SIZE, SIZE, *[2 * SIZE] * 4]
    # What was computed again is kept again.
    assert cached(kept)[1] == {}


def test_a_file_that_was_cut_is_a_cold_start(kept, caplog):
    os.truncate(kept, kept.stat().st_size - 4096)
    assert cached(kept)[0] == [0] * len(PROMPTS)
    assert "starts without blocks: the file has" in caplog.text


def test_a_file_that_is_gone_is_a_cold_start(kept):
    kept.unlink()
    assert cached(kept)[0] == [0] * len(PROMPTS)


def test_another_size_is_a_cold_start(kept, caplog):
    assert cached(kept, host=20)[0] == [0] * len(PROMPTS)
    assert "it was made for 16 blocks, now 20" in caplog.text


@pytest.mark.parametrize("host", [8, 20])
def test_a_file_is_changed_with_the_first_block_and_not_before(kept, tmp_path, host):
    before = kept.read_bytes()
    with kept_serving(kept, host=host) as executor:
        assert executor.restore() == 0
        executor.save()
    assert kept.read_bytes()[: len(before)] == before
    (tmp_path / "disk").write_text("no folder")
    tiers = [
        Tier("gpu", blocks=4),
        Tier("host", blocks=host, keep=str(kept)),
        Tier("disk", blocks=4, path=str(tmp_path / "disk")),
    ]
    with pytest.raises((ConfigError, TransferError)):
        open_pools(SHAPE, tiers, SIZE)
    assert kept.read_bytes()[: len(before)] == before
    assert cached(kept)[0] == [2 * SIZE] * len(PROMPTS)
    with kept_serving(kept, host=host) as executor:
        ask(executor, PROMPTS[0])
        executor.save()
    assert cached(kept, host=host)[0] == [2 * SIZE] + [0] * (len(PROMPTS) - 1)
    assert cached(kept)[0] == [0] * len(PROMPTS)


def test_a_refused_call_leaves_no_new_file(path, tmp_path):
    (tmp_path / "disk").write_text("no folder")
    tiers = [
        Tier("gpu", blocks=4),
        Tier("host", blocks=4, keep=str(path)),
        Tier("disk", blocks=4, path=str(tmp_path / "disk")),
    ]
    with pytest.raises((ConfigError, TransferError)):
        open_pools(SHAPE, tiers, SIZE)
    assert not [*path.parent.iterdir()]
    path.write_bytes(b"x" * 100)
    path.chmod(0o644)
    with pytest.raises(ConfigError), kept_serving(path):
        pass
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"x" * 100, 0o644)


def test_a_file_that_was_replaced_while_open_is_not_removed(path):
    with kept_serving(path):
        path.rename(path.with_name("moved"))
        fill(path)
    assert cached(path)[0] == [2 * SIZE] * len(PROMPTS)


def test_other_weights_are_refused_by_name_and_replaced_if_asked(kept):
    other = replace(SHAPE, fingerprint="other weights")
    with (
        pytest.raises(ConfigError, match=r"keeps the blocks of .*other weights.*keep_replace"),
        kept_serving(kept, shape=other),
    ):
        pass
    assert cached(kept)[0] == [2 * SIZE] * len(PROMPTS)
    assert cached(kept, shape=other, replace=True)[0] == [0] * len(PROMPTS)
    with pytest.raises(ConfigError, match="keep_replace"), kept_serving(kept):
        pass


def test_another_file_is_refused_and_replaced_if_asked(path):
    path.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="lose its 5000 bytes"), kept_serving(path):
        pass
    assert path.read_bytes() == b"x" * 5000
    assert cached(path, replace=True)[0] == [0] * len(PROMPTS)


def test_another_version_is_refused_by_name(kept):
    data = bytearray(kept.read_bytes())
    data[16] = 2
    kept.write_bytes(bytes(data))
    # Its checksum is not that of this version's header: nothing in it can be used.
    assert cached(kept)[0] == [0] * len(PROMPTS)


def test_the_second_of_two_servers_starts_cold_with_its_own_memory(kept, caplog):
    with kept_serving(kept) as first:
        assert first.restore() == BLOCKS
        with kept_serving(kept) as second:
            assert not isinstance(second.pools[1], KeptPool)
            assert second.restore() == 0
            assert [ask(second, tokens) for tokens in PROMPTS] == [0] * len(PROMPTS)
        assert f"process {os.getpid()} writes there" in caplog.text
        assert ask(first, PROMPTS[0]) == 2 * SIZE
    assert cached(kept)[0] == [2 * SIZE] * len(PROMPTS)


def test_the_lock_of_a_process_that_is_being_killed_is_awaited(kept):
    """A zombie has died, and its lock goes as soon as the system has freed its memory."""
    tier = Tier("host", blocks=16, keep=str(kept))
    script = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, kept], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        holder.stdout.readline()
        # The header's owner is this process, which lives.
        assert kept_pool(SHAPE, tier, SIZE) is None
        with kept.open("r+b") as file:
            file.seek(128 + 16)
            file.write((1).to_bytes(8, "little"))  # another process had this number then
        assert kept_pool(SHAPE, tier, SIZE, patience_s=0.1) is None
        holder.kill()
    pool = kept_pool(SHAPE, tier, SIZE)
    assert pool is not None
    pool.close()


def test_a_file_system_without_room_is_an_error_with_the_numbers(tmp_path):
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespace of its own: unshare -rm does not work here")
    (tmp_path / "memory").mkdir()
    script = f"""
        import pathlib, sys
        sys.path[:0] = [{str(KILLS.parent)!r}, {str(KILLS.parents[1])!r}]
        from kept import kept_serving
        from kvtrie.errors import KvtrieError
        from test_kept import PROMPTS, SIZE, cached, fill
        path = pathlib.Path("{tmp_path}/memory/pool")
        for _ in range(2):  # without a file, and over the one of an earlier process
            try:
                with kept_serving(path, host=200):
                    pass
            except KvtrieError as error:
                print(error)
            if not path.exists():
                print("no file")
                fill(path)
        assert cached(path)[0] == [2 * SIZE] * len(PROMPTS)
        print("found")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = (
        f"mount -t tmpfs -o size=128k none {tmp_path}/memory && "
        f"{sys.executable} {tmp_path}/script.py"
    )
    ended = subprocess.run(
        [unshare, "-rm", "sh", "-c", command], check=True, capture_output=True, text=True
    )
    first, none, second, found = ended.stdout.splitlines()
    assert "131072 free of 131072" in first
    assert "--shm-size" in first
    assert "free of 131072" in second
    assert (none, found) == ("no file", "found")


def test_a_disk_is_no_memory(tmp_path):
    if os.statvfs(tmp_path).f_fsid == os.statvfs(MEMORY).f_fsid:
        pytest.skip("the folder of tests is in memory")
    with pytest.raises(ConfigError, match="is not memory: tmpfs"), kept_serving(tmp_path / "pool"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "gpu", "blocks": 1, "keep": "pool"}, "not 'gpu'"),
        ({"kind": "host", "blocks": 1, "keep": "pool", "layer_slots": True}, "layer_slots"),
        ({"kind": "host", "blocks": 1, "keep": "pool", "owner": "none"}, "'none'"),
        ({"kind": "host", "blocks": 1, "keep_replace": True}, "keep='PATH'"),
        ({"kind": "host", "blocks": 1, "keep": 3}, "a path wanted"),
    ],
)
def test_keep_is_for_whole_blocks_of_a_host_tier(settings, words):
    with pytest.raises(ConfigError, match=words):
        Tier(**settings)


def test_the_first_tier_cannot_be_kept(path):
    with pytest.raises(ConfigError, match="below the first one"):
        open_pools(SHAPE, [Tier("host", blocks=4, keep=str(path))], SIZE)
    assert not path.exists()


def test_a_model_without_a_name_cannot_be_kept(path):
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4, keep=str(path))]
    with pytest.raises(ConfigError, match="fingerprint"):
        BlockManager(replace(SHAPE, fingerprint=""), tiers, block_tokens=SIZE)


def test_ranks_have_separate_files(path):
    shape = replace(SHAPE, tp=2)
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=4, keep=str(path))]
    pools = [open_pools(shape, tiers, SIZE, rank=rank, ranks=2)[1] for rank in range(2)]
    assert [str(pool.file.path) for pool in pools] == [f"{path}-0", f"{path}-1"]
    assert len({pool.file.about for pool in pools}) == 2
    for pool in pools:
        pool.close()


def test_ages_and_uses_come_back(path):
    clock = [10**18]
    with kept_serving(path) as executor:
        executor.pools[1]._clock = lambda: clock[0]
        for tokens in PROMPTS:
            ask(executor, tokens)
        for _ in range(3):
            ask(executor, PROMPTS[0])
        executor.save()
    clock[0] += 5 * 10**9
    with kept_serving(path) as executor:
        executor.pools[1]._clock = lambda: clock[0]
        index = executor.pools[1].recall()
        assert index.age.min() >= 5 * 10**9
        assert index.uses.max() >= 4


def test_more_layers_of_a_block_are_kept_with_those_that_are_there(kept):
    """Layers that come again, into the same slot."""
    with kept_serving(kept) as executor:
        host, manager = executor.pools[1], executor.manager
        rows = [(label, slot, lo, hi) for label, slot, lo, hi in host.recall()]
        key = host.recall().key[0].tobytes()
        slot, layers = rows[0][1], SHAPE.layers
        slots = np.array([slot])
        assert not host.begin(slots, [key], (1, layers))
        assert host.file.unverified == BLOCKS - 1, "the layers that are there were proved first"
        host.finish(slots, [key], [rows[0][0]], ok=True)
        assert host.seal()
        assert manager.load_index(host.recall(), 1, now=0) == BLOCKS


def test_more_layers_of_a_damaged_block_are_refused(kept):
    whole = kept.read_bytes()
    pool = len(whole) - 16 * SHAPE.block_bytes(SIZE)
    with kept_serving(kept) as executor:
        host = executor.pools[1]
        index = host.recall()
        slot, key = int(index.slot[0]), index.key[0].tobytes()
        flip(kept, pool + slot * SHAPE.block_bytes(SIZE))
        slots = np.array([slot])
        assert "damaged" in host.begin(slots, [key], (1, SHAPE.layers))[0]
        # Not either when asked again: the first layer is not there.
        assert "damaged" in host.begin(slots, [key], (1, SHAPE.layers))[0]
        assert "damaged" in host.verify(slots, [key])[0]
        assert not host.begin(slots, [key], (0, SHAPE.layers))
        assert not host.verify(slots, [key])


def test_a_failed_copy_is_not_kept(path, monkeypatch):
    with kept_serving(path) as executor:
        monkeypatch.setattr(executor.pools[1], "copy_from", lambda *_: 1 / 0)
        for tokens in PROMPTS[:3]:
            ask(executor, tokens)
        executor.flush()
        assert executor.pools[1].kept_blocks == 0
    with kept_serving(path) as executor:
        assert executor.restore() == 0
        assert not executor.pools[1].lost_blocks


def test_blocks_on_disk_come_back_with_those_in_memory(path, tmp_path):
    """A path whose start is only on disk and whose end is only in memory is whole again."""
    tiers = [
        Tier("gpu", blocks=4),
        Tier("host", blocks=4, keep=str(path)),
        Tier("disk", blocks=32, path=str(tmp_path)),
    ]

    def run(restore):
        pools = open_pools(SHAPE, tiers, SIZE)
        manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
        with pools[2], Executor(manager, pools, workers=1) as executor:
            found = executor.restore()
            assert found > BLOCKS - 4 if restore else not found
            answers = [ask(executor, tokens) for tokens in PROMPTS]
            executor.save()
            pools[1].close()
            return answers

    run(restore=False)
    assert run(restore=True) == [2 * SIZE] * len(PROMPTS)


def test_a_kept_tier_of_another_format_comes_back(path):
    shape = replace(SHAPE, head_dim=8)
    layout = Layout(dtype="float16")
    tiers = [Tier("gpu", blocks=4), Tier("host", blocks=16, keep=str(path), layout=layout)]

    def run():
        pools = open_pools(shape, tiers, SIZE)
        manager = BlockManager(shape, tiers, block_tokens=SIZE)
        with Executor(manager, pools, workers=1) as executor:
            found = executor.restore()
            with manager.acquire(PROMPTS[0], now=0, keep=0) as lease:
                executor.wait(lease)
                if not found:
                    lease.commit(PROMPTS[0], now=0)
                matched = lease.matched
            executor.save()
            pools[1].close()
            return found, matched

    assert run() == (0, 0)
    assert run() == (2, 2 * SIZE)
    # The plain format's file is another one's.
    with pytest.raises(ConfigError, match="keep_replace"), kept_serving(path, shape=shape):
        pass


def test_dropping_the_pool_gives_the_lock_back(kept):
    pools = open_pools(
        SHAPE, [Tier("gpu", blocks=4), Tier("host", blocks=16, keep=str(kept))], SIZE
    )
    assert isinstance(pools[1], KeptPool)
    del pools
    gc.collect()
    assert cached(kept)[0] == [2 * SIZE] * len(PROMPTS)


def test_a_closed_pool_takes_no_blocks(path):
    with kept_serving(path) as executor:
        ask(executor, PROMPTS[0])
        executor.save()
        executor.pools[1].close()
        for tokens in PROMPTS[1:]:
            ask(executor, tokens)
        executor.drain()
        assert executor.manager.stats().tiers["host"].failed


@pytest.mark.deep
def test_a_million_labels_are_loaded(path):
    """The label of each block is read, and the manager has it again."""
    from kvtrie import ModelShape

    shape = ModelShape(layers=1, kv_heads=1, head_dim=1, dtype="int8", fingerprint="many")
    blocks, size = 1_000_000, 16
    tiers = [Tier("gpu", blocks=blocks), Tier("host", blocks=blocks, keep=str(path))]
    manager = BlockManager(shape, tiers, block_tokens=size)
    pool = kept_pool(shape, tiers[1], size)
    long = np.arange(blocks * size, dtype=np.uint32)
    for first in range(0, blocks, 100_000):
        tokens = long[first * size : (first + 100_000) * size]
        with manager.acquire(tokens, now=0, keep=0) as lease:
            lease.commit(tokens, now=0)
    index = manager.index(0, now=0)
    slots = np.arange(blocks)
    keys = [key.tobytes() for key in index.key]
    labels = [label for label, *_ in index]
    pool.begin(slots, keys, (0, 1))
    pool.finish(slots, keys, labels, ok=True)
    pool.keep(index)
    pool.close()
    pool = kept_pool(shape, tiers[1], size)
    manager = BlockManager(shape, tiers, block_tokens=size)
    assert manager.load_index(pool.recall(), 1, now=0) == blocks
    pool.close()
