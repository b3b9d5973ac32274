"""KeyedDisk: bounded, proved, found again; keys are the engine's."""

import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers import keyed_disk
from kvtrie.tiers.key_label import content_key
from kvtrie.tiers.keyed_disk import KeyedDisk

SIZE = 3000


def block(key):
    return np.random.default_rng(int.from_bytes(key, "little")).integers(0, 256, SIZE, np.uint8)


def opened(folder, blocks=8, **more):
    return KeyedDisk(folder, meaning="a model", size=SIZE, blocks=blocks, **more)


def found(disk, key):
    """Whether a block is found; if so it is the right one."""
    memory = np.zeros(SIZE, np.uint8)
    (result,) = disk.read_many([(key, memory)])
    assert not result or (memory == block(key)).all()
    return result


def keys(count, first=0):
    return [b"key %d" % at for at in range(first, first + count)]


def test_blocks_are_found_again_by_a_later_process_of_the_same_meaning(tmp_path):
    disk = opened(tmp_path)
    assert disk.write_many([(key, block(key)) for key in keys(5)]) == [True] * 5
    assert disk.write_many([(key, block(key)) for key in keys(2)]) == [True] * 2
    disk.close()
    disk = opened(tmp_path)
    assert len(disk) == 5
    assert all(found(disk, key) for key in keys(5))
    assert not found(disk, b"another")
    disk.close()
    other = KeyedDisk(tmp_path, meaning="another model", size=SIZE, blocks=8)
    assert len(other) == 0
    other.close()


def test_random_operations_stay_in_bounds_and_are_never_wrong(tmp_path):
    draw, disk = random.Random(0), opened(tmp_path)
    stored = set()
    for _ in range(300):
        some = draw.sample(keys(30), draw.randint(1, 4))
        if draw.random() < 0.5:
            after = draw.choice([None, *keys(30)])
            written = disk.write_many([(key, block(key)) for key in some], after=after)
            assert all(written)
            stored.update(some)
        else:
            for key in some:
                assert found(disk, key) <= (key in stored)
        if draw.random() < 0.02:
            disk.close()
            disk = opened(tmp_path)
        assert len(disk) <= 8
    assert len(disk) == 8
    most = disk.store.slot_bytes * 8 + (1 << 20)
    assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) <= most
    disk.close()


def test_a_damaged_block_is_a_miss_and_gone(tmp_path):
    disk = opened(tmp_path)
    disk.write_many([(key, block(key)) for key in keys(8)])
    disk.close()
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    (data,) = [each for each in files if each.stat().st_size > 8 * SIZE]
    raw = bytearray(data.read_bytes())
    for at in range(100, len(raw), SIZE):
        raw[at] ^= 4
    data.write_bytes(raw)
    disk = opened(tmp_path)
    assert sum(found(disk, key) for key in keys(8)) == len(disk) < 8
    assert disk.write_many([(key, block(key)) for key in keys(8)]) == [True] * 8
    assert all(found(disk, key) for key in keys(8))
    disk.close()


def test_room_is_named_once_and_holds_a_block(tmp_path):
    with pytest.raises(ConfigError, match="one of them wanted"):
        KeyedDisk(tmp_path, meaning="m", size=SIZE)
    with pytest.raises(ConfigError, match="no room for a block of 3000"):
        KeyedDisk(tmp_path, meaning="m", size=SIZE, bytes=100)
    disk = KeyedDisk(tmp_path, meaning="m", size=SIZE, bytes=200_000)
    disk.write_many([(key, block(key)) for key in keys(100)])
    assert disk.store.disk_bytes <= 200_000
    disk.close()


def test_a_second_process_reads_only(tmp_path):
    disk = opened(tmp_path)
    disk.write_many([(key, block(key)) for key in keys(2)])
    second = opened(tmp_path)
    assert second.read_only
    assert second.write_many([(b"new", block(b"new"))]) == [False]
    second.close()
    disk.close()


def test_threads_read_and_write_together(tmp_path):
    disk, wrong = opened(tmp_path), []

    def play(seed):
        draw = random.Random(seed)
        for _ in range(60):
            some = draw.sample(keys(20), 3)
            try:
                if draw.random() < 0.5:
                    disk.write_many([(key, block(key)) for key in some])
                else:
                    [found(disk, key) for key in some]
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                wrong.append(error)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    assert len(disk) <= 8
    disk.clear()
    assert len(disk) == 0
    disk.close()


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.tiers.test_keyed_disk import block, keys, opened
disk = opened(sys.argv[1])
disk.write_many([(key, block(key)) for key in keys(6)])
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL")
def test_a_kill_leaves_what_was_written(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path.cwd())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline().strip() == b"written"
        child.kill()
    disk = opened(tmp_path)
    assert all(found(disk, key) for key in keys(6))
    disk.close()


class Clock:
    """A wall clock that the test moves."""

    def __init__(self):
        self.now = 10**18

    def __call__(self):
        return self.now


def leaving(disk):
    """The blocks that are here, in the order in which they leave."""
    digests = {content_key(key): key for key in keys(8)}
    return [digests[one] for one in disk._order.evict(len(disk))]


def used(disk, clock, draw):
    """Uses of every kind over 100 s."""
    for key in draw.choices(keys(8), k=40):
        clock.now += 25 * 10**8
        if draw.random() < 0.5:
            assert found(disk, key)
        elif draw.random() < 0.5:
            disk.use([key])
        else:
            disk.write_many([(key, block(key))])


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_ages_and_uses_outlive_the_process(tmp_path, end):
    clock, draw = Clock(), random.Random(1)
    disk = opened(tmp_path / "lives", clock=clock)
    for key in keys(8):
        clock.now += 10**9
        assert disk.write_many([(key, block(key))]) == [True]
    used(disk, clock, draw)
    clock.now += 5 * 10**9
    if end == "killed":
        assert found(disk, b"key 2")  # the last use, five seconds after the others
        assert disk._used == {}
    else:
        disk.use([b"key 2"])
        disk.close()
    shutil.copytree(tmp_path / "lives", tmp_path / "again")
    clock.now += 1000 * 10**9
    again = opened(tmp_path / "again", clock=clock)
    digests = [content_key(key) for key in keys(8)]
    wanted = disk._order.ages(digests)
    assert again._order.ages(digests) == wanted
    assert len({uses for _, uses in wanted}) > 3
    oldest = dict(sorted(zip(keys(8), wanted, strict=True), key=lambda row: -row[1][0]))
    assert leaving(again) == sorted(oldest, key=lambda key: min(oldest[key][1], 8)) != keys(8)
    again.close()
    disk.close()


def test_uses_are_written_down_a_few_at_a_time_and_a_failure_fails_no_call(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(keyed_disk, "_AT_ONCE", 3)
    clock = Clock()
    disk = opened(tmp_path, clock=clock)
    disk.write_many([(key, block(key)) for key in keys(8)])
    disk.use(keys(8))
    disk.use([b"another"])
    left = []
    for _ in range(2):
        found(disk, b"another")
        left.append(len(disk._used))
    clock.now += 5 * 10**9
    for _ in range(4):
        found(disk, b"another")
        left.append(len(disk._used))
    assert left == [8, 8, 5, 2, 0, 0]

    class Failing:
        folder = "a folder"

        def __getattr__(self, name):
            return getattr(store, name)

        def note_uses(self, *_):
            raise TransferError("injected")

    store, disk.store = disk.store, Failing()
    disk.use([b"key 1"])
    clock.now += 5 * 10**9
    assert found(disk, b"key 2")
    assert "a folder: uses were not written down: injected" in caplog.text
    disk.clear()
    assert (len(disk), disk._used) == (0, {})
    disk.close()


def test_who_only_reads_writes_no_uses_down(tmp_path):
    clock = Clock()
    writer = opened(tmp_path, clock=clock)
    writer.write_many([(key, block(key)) for key in keys(3)])
    reader = opened(tmp_path, clock=clock)
    clock.now += 10**10
    assert all(found(reader, key) for key in keys(3))
    reader.close()
    writer.close()
