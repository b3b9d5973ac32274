"""The disk tier: what was kept is found again, bit for bit, or it is a miss with a reason."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from keeping import (
    DISK,
    PAGE,
    SECOND,
    SHAPE,
    SIZE,
    WALL,
    Clock,
    ask,
    fill,
    kv,
    open_disk,
    prompt,
    rows,
    serving,
    stores,
)

from kvtrie import BlockManager, Tier
from kvtrie._kvtrie import Faults
from kvtrie.errors import ClosedError, ConfigError, TransferError
from kvtrie.model.layout import Layout
from kvtrie.tiers import DiskStorage, PersistentStorage, open_pools
from kvtrie.transfer import Executor


@pytest.mark.parametrize("durability", ["none", "flush", "fsync"])
def test_a_second_manager_finds_everything_bit_for_bit(tmp_path, durability):
    prompts = [prompt(seed, 1 + seed % 3) for seed in range(12)]
    fill(tmp_path, prompts, durability=durability)
    with serving(tmp_path, durability=durability, workers=2) as executor:
        assert isinstance(executor.pools[2], PersistentStorage)
        assert executor.restore() == sum(map(len, prompts)) // SIZE
        executor.manager.audit()
        assert [ask(executor, tokens) for tokens in prompts] == [*map(len, prompts)]
        executor.drain()
        executor.manager.audit()
        assert executor.manager.stats().tiers["disk"].bytes_written == 0


def test_a_tier_with_a_path_needs_nothing_else(tmp_path):
    folder = tmp_path / "kv"
    tiers = [Tier("gpu", blocks=4), Tier("disk", blocks=8, path=str(folder), durability="none")]
    for cached in (0, 12):
        manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
        pools = open_pools(SHAPE, tiers, SIZE)
        assert pools[1].store.slots == 8
        with pools[1], Executor(manager, pools) as executor:
            assert executor.restore() == cached // SIZE
            assert ask(executor, prompt(1, 3)) == cached
            executor.flush()
            if not cached:  # nothing of it has reached the manifest, as the tier asked
                shutil.copytree(folder, tmp_path / "died")
            executor.save()
    assert rows(tmp_path / "died") == []


@pytest.mark.parametrize("layer_slots", [False, True])
def test_k_and_v_in_two_planes_are_found_again(tmp_path, layer_slots):
    layout, prompts = Layout(kv="split"), [prompt(seed, 2) for seed in range(6)]
    tiers = [Tier("gpu", blocks=4, layout=layout, layer_slots=layer_slots)]
    tiers += [Tier("disk", blocks=DISK, layout=layout, path=str(tmp_path))]
    for found in (0, 2 * SIZE):
        manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
        pools = open_pools(SHAPE, tiers, SIZE)
        with pools[1], Executor(manager, pools, workers=0) as executor:
            assert executor.restore() == (12 if found else 0)
            assert [ask(executor, tokens) for tokens in prompts] == [found] * 6
            executor.save()


def test_models_share_a_folder_and_not_their_blocks(tmp_path):
    shapes = [replace(SHAPE, fingerprint=name) for name in ("one", "two")]
    tokens = prompt(1, 2)
    with serving(tmp_path, shape=shapes[0]) as one, serving(tmp_path, shape=shapes[1]) as two:
        assert not one.pools[2].read_only
        assert not two.pools[2].read_only
        for executor in (one, two):
            assert ask(executor, tokens) == 0
            executor.save()
    assert len(stores(tmp_path)) == 2
    for shape in shapes:
        with serving(tmp_path, shape=shape) as executor:
            assert executor.restore() == 2
            assert ask(executor, tokens) == len(tokens)


@pytest.mark.parametrize(
    "other",
    [
        {"layout": Layout(rope="plain")},
        {"layout": Layout(alignment=512)},
        {"size": 2 * SIZE},
        {"rank": 1},
        {"shape": replace(SHAPE, fingerprint="other")},
        {"shape": replace(SHAPE, dtype="float16")},
        {"shape": replace(SHAPE, kv_heads=4, tp=2)},
        {"shape": replace(SHAPE, layers=5)},
    ],
    ids=str,
)
def test_what_means_something_else_is_not_found(tmp_path, other):
    tokens = prompt(1, 2)
    fill(tmp_path, [tokens])
    with serving(tmp_path, **other) as executor:
        assert not executor.pools[2].read_only
        assert executor.restore() == 0
        assert executor.manager.lookup(tokens, now=executor.clock(), keep=0).tokens == 0
        executor.save()  # keeps nothing, and takes nothing from the other
    with serving(tmp_path) as executor:
        assert executor.restore() == 2
        assert ask(executor, tokens) == len(tokens)


def test_ranks_share_a_folder_and_not_their_bytes(tmp_path):
    shape = replace(SHAPE, kv_heads=4, tp=2)
    tiers = [Tier("gpu", blocks=4), Tier("disk", blocks=8, path=str(tmp_path))]
    tokens, written = prompt(1, 3), {}
    for cached in (0, 3):
        opened = [open_pools(shape, tiers, SIZE, rank=rank, ranks=2) for rank in range(2)]
        assert not any(disk.read_only for _, disk in opened)
        assert len({disk.store.folder for _, disk in opened}) == 2
        for rank, (gpu, disk) in enumerate(opened):
            manager = BlockManager(shape, tiers, block_tokens=SIZE)
            with disk, Executor(manager, [gpu, disk], workers=0) as executor:
                assert executor.restore() == cached
                lease = manager.acquire(tokens, now=executor.clock(), keep=0, load="all")
                executor.wait(lease)
                assert lease.matched == cached * SIZE
                units = gpu.table(lease.slots(0)).flatten()
                if not cached:
                    written[rank] = torch.randn(3 * SHAPE.layers, gpu.planes[0].shape[1] // 4)
                    gpu.planes[0][units] = written[rank].view(torch.uint8)
                    lease.commit(tokens, now=executor.clock())
                assert torch.equal(gpu.planes[0][units].view(torch.float32), written[rank])
                lease.release()
                executor.save()
    assert not torch.equal(written[0], written[1])
    assert len(stores(tmp_path)) == 2
    for build in (
        lambda: open_pools(shape, tiers, SIZE, rank=2, ranks=2),
        lambda: DiskStorage.of_tier(shape, tiers[1], SIZE, rank=2, ranks=2),
    ):
        with pytest.raises(ConfigError, match="rank is 2, 0 to 1 wanted, for 2 ranks"):
            build()
    with pytest.raises(ConfigError, match="rank is -1"):
        DiskStorage(tmp_path, shape, DISK, SIZE, rank=-1)


def test_ages_and_uses_carry_over_from_one_clock_to_another(tmp_path):
    clock = Clock(1000 * SECOND)
    with serving(tmp_path, clock=clock) as executor:
        ask(executor, prompt(1))
        ask(executor, prompt(1))
        clock.now += 3 * SECOND
        ask(executor, prompt(2))
        clock.now += 4 * SECOND
        executor.save()
    for elapsed, added in ((10, 10), (0, 0), (-5, 0)):
        clock = Clock(2000 * SECOND)
        with serving(tmp_path, clock=clock, wall=Clock(WALL + elapsed * SECOND)) as executor:
            assert executor.restore() == 2
            clock.now += SECOND
            index = executor.manager.index("disk", now=clock())
            restored = dict(zip((index.age // SECOND).tolist(), index.uses.tolist(), strict=True))
            assert set(restored) == {8 + added, 5 + added}
            assert restored[8 + added] == restored[5 + added] + 1


def test_a_second_opener_only_reads_and_warns(tmp_path, caplog):
    prompts = [prompt(seed) for seed in range(6)]
    with serving(tmp_path) as writer:
        for tokens in prompts:
            ask(writer, tokens)
        writer.save()
        with caplog.at_level(logging.WARNING, "kvtrie"), serving(tmp_path) as reader:
            assert reader.pools[2].read_only
            assert "read-only" in caplog.text
            assert str(stores(tmp_path)[0]) in caplog.text
            assert reader.restore() == len(prompts)
            assert [ask(reader, tokens) for tokens in prompts] == [SIZE] * len(prompts)
            for seed in range(100, 120):  # more than gpu and host hold: they must go down
                assert ask(reader, prompt(seed)) == 0
            reader.save()
            reasons = {row.reason for row in reader.manager.failed()}
            assert any("read-only" in reason for reason in reasons)
            reader.manager.audit()
            # The writer takes the reader's slots for others: misses, and never another's bytes.
            for seed in range(200, 200 + DISK):
                ask(writer, prompt(seed))
            writer.drain()
            assert {ask(reader, tokens) for tokens in prompts} <= {0, SIZE}
            reader.manager.audit()
        writer.save()
        writer.manager.audit()
    with serving(tmp_path) as executor:
        assert not executor.pools[2].read_only
        assert executor.restore() == DISK
        assert executor.manager.lookup(prompt(231), now=executor.clock(), keep=0).tokens == SIZE


def test_slots_that_the_writer_used_again_are_misses_of_the_reader(tmp_path, caplog):
    old, new = ([prompt(100 * age + seed) for seed in range(4)] for age in (1, 2))
    settings = {"gpu": 2, "host": 2, "disk": 4}
    with serving(tmp_path, **settings) as writer:
        for tokens in old:
            ask(writer, tokens)
        writer.save()
        with serving(tmp_path, **settings) as reader:
            assert reader.restore() == 4
            for tokens in new:
                ask(writer, tokens)
            writer.flush()
            with caplog.at_level(logging.WARNING, "kvtrie"):
                found = [ask(reader, tokens) for tokens in old]
            assert found.count(0) >= 2
            assert caplog.text.count("no header of block") >= found.count(0)
            reader.manager.audit()


def test_a_folder_that_may_not_be_written_is_read(tmp_path, caplog):
    faults = Faults()
    faults.inject("denied", per_mille=1000)
    with pytest.raises(TransferError, match="ermission denied"):
        open_disk(tmp_path, SHAPE, DISK, SIZE, faults=faults)
    fill(tmp_path, [prompt(1)])
    with serving(tmp_path, faults=faults) as executor:
        assert "read-only" in caplog.text
        assert executor.restore() == 1
        assert ask(executor, prompt(1)) == SIZE


@pytest.mark.parametrize(("alignment", "slot_bytes"), [(1, 6 * PAGE), (2 * PAGE, 10 * PAGE)])
def test_the_files_never_exceed_the_budget(tmp_path, alignment, slot_bytes):
    budget, layout = 20 * 6 * PAGE + 300_000, Layout(alignment=alignment)
    most_room = budget // slot_bytes
    tiers = [
        Tier("gpu", blocks=4, layout=layout),
        Tier("host", blocks=4, layout=layout),
        Tier("disk", bytes=budget, path=str(tmp_path), layout=layout),
    ]
    room = tiers[2].room(SHAPE, SIZE)
    assert most_room // 2 < room <= most_room
    most = 0

    def measured(_):
        nonlocal most
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        most = max(most, sum(512 * path.stat().st_blocks for path in files))
        assert most <= budget

    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = open_pools(SHAPE, tiers, SIZE)
    assert (pools[2].store.slots, pools[2].store.slot_bytes) == (room, slot_bytes)
    with pools[2], Executor(manager, pools, workers=0, progress=measured) as executor:
        for seed in range(4 * room):
            ask(executor, prompt(seed))
            executor.drain()
        executor.save()
        measured(None)
        assert len(rows(tmp_path)) == room
        assert manager.stats().tiers["disk"].dropped > 2 * room
    assert most > room * pools[2].store.slot_bytes


@pytest.mark.parametrize(("durability", "found"), [("none", 0), ("flush", 6), ("fsync", 6)])
def test_what_a_process_leaves_that_does_not_close(tmp_path, durability, found):
    with serving(tmp_path / "alive", durability=durability) as executor:
        for seed in range(6):
            ask(executor, prompt(seed))
        executor.flush()
        shutil.copytree(tmp_path / "alive", tmp_path / "died")
    for folder, wanted in (("alive", 6), ("died", found)):
        with serving(tmp_path / folder) as executor:
            assert executor.restore() == wanted
            assert sum(ask(executor, prompt(seed)) for seed in range(6)) == wanted * SIZE


KILLED = """
import sys
from keeping import ask, prompt, serving

with serving(sys.argv[1], disk=500, durability="flush", workers=2) as executor:
    for seed in range(200):
        ask(executor, prompt(seed, 2))
        executor.flush()
        print(seed, flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_leaves_what_it_wrote(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        seeds = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)  # in the middle of the next ones
    assert process.returncode == -signal.SIGKILL
    with serving(tmp_path, disk=500) as executor:
        assert not executor.pools[2].read_only  # the lock went with the process
        assert executor.restore() >= 2 * len(seeds)
        assert {ask(executor, prompt(seed, 2)) for seed in seeds} == {2 * SIZE}
        executor.manager.audit()


def test_closing_twice_does_nothing_and_later_calls_are_refused(tmp_path):
    fill(tmp_path, [prompt(1)])
    storage = DiskStorage(tmp_path, SHAPE, DISK, SIZE)
    index = storage.recall()
    ((label, slot, lo, hi),) = index
    memory = torch.empty(hi - lo, SIZE * 64, dtype=torch.uint8)
    storage.read(index.key[0].tobytes(), slot, (lo, hi), memory)
    assert torch.equal(memory.view(torch.float32).flatten(), kv(prompt(1)).flatten())
    storage.close()
    storage.close()
    for call in (
        lambda: storage.write(index.key[0].tobytes(), slot, (lo, hi), memory, label),
        lambda: storage.read(index.key[0].tobytes(), slot, (lo, hi), memory),
        storage.recall,
        lambda: storage.keep(index),
    ):
        with pytest.raises(ClosedError, match="is closed"):
            call()
    with serving(tmp_path) as executor:  # the lock was given back, and nothing is lost
        assert not executor.pools[2].read_only
        assert executor.restore() == 1


def test_a_closed_storage_fails_moves_and_no_request(tmp_path):
    with serving(tmp_path) as executor:
        executor.pools[2].close()
        for seed in range(20):
            ask(executor, prompt(seed))
        executor.drain()
        assert any("ClosedError" in row.reason for row in executor.manager.failed())
        executor.manager.audit()


def test_wrong_settings_are_refused(tmp_path):
    for build in (
        lambda: Tier("disk", blocks=4, durability="forever"),
        lambda: DiskStorage(tmp_path, SHAPE, DISK, SIZE, durability="forever"),
    ):
        with pytest.raises(ConfigError, match=r"none.*flush.*fsync.*'forever'"):
            build()
    with pytest.raises(ConfigError, match="layer_slots"):
        open_pools(SHAPE, [Tier("disk", blocks=4, path=str(tmp_path), layer_slots=True)], SIZE)
    with pytest.raises(ConfigError, match="needs a path"):
        DiskStorage.of_tier(SHAPE, Tier("disk", blocks=4), SIZE)
    with pytest.raises(ConfigError, match="0 blocks of 1024"):
        open_pools(SHAPE, [Tier("disk", bytes=20_000, path=str(tmp_path))], SIZE)
    (tmp_path / "file").write_text("")
    with pytest.raises(TransferError, match="file"):
        DiskStorage(tmp_path / "file", SHAPE, DISK, SIZE)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_calls_of_many_threads_do_not_mix(tmp_path):
    fill(tmp_path / "labels", [prompt(seed) for seed in range(32)])
    source = DiskStorage(tmp_path / "labels", SHAPE, DISK, SIZE)
    index = source.recall()
    labelled = [(key.tobytes(), row) for key, row in zip(index.key, index, strict=True)]
    target = DiskStorage(tmp_path / "target", SHAPE, DISK, SIZE)
    wrong = []

    def work(part):
        for key, (label, slot, lo, hi) in part:
            memory = torch.empty(hi - lo, SIZE * 64, dtype=torch.uint8)
            again = torch.empty_like(memory)
            source.read(key, slot, (lo, hi), memory)
            target.write(key, slot, (lo, hi), memory, label)
            target.read(key, slot, (lo, hi), again)
            if not torch.equal(memory, again):
                wrong.append(slot)

    threads = [threading.Thread(target=work, args=(labelled[at::4],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(target.recall()) == 32
    source.close()
    target.close()


@pytest.mark.gpu
def test_memory_of_a_gpu_goes_through_the_host(tmp_path):
    fill(tmp_path, [prompt(1)])
    with DiskStorage(tmp_path, SHAPE, DISK, SIZE) as storage:
        index = storage.recall()
        ((label, slot, lo, hi),) = index
        key = index.key[0].tobytes()
        memory = torch.zeros(hi - lo, SIZE * 64, dtype=torch.uint8, device="cuda")
        storage.read(key, slot, (lo, hi), memory)
        found = memory.cpu().view(torch.float32).flatten()
        assert torch.equal(found, kv(prompt(1)).flatten())
        storage.write(key, slot + 1, (lo, hi), memory, label)
        storage.read(key, slot + 1, (lo, hi), memory)
        assert torch.equal(memory.cpu().view(torch.float32).flatten(), found)
