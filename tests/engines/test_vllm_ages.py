"""Ages of blocks on disk outlive a kill: what leaves next is what would have left anyway."""

import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.engines.vllm_engine import SIZE, Engine

from kvtrie import BlockManager, Index, ModelShape, Tier
from kvtrie.engines.vllm.age_writer import AgeWriter
from kvtrie.errors import TransferError
from kvtrie.transfer.used_blocks import UsedBlocks

SECOND = 1_000_000_000
PROMPTS = [[at, *range(1, (2 + at % 3) * SIZE), at] for at in range(8)]


class Clock:
    def __init__(self, now=10**6 * SECOND):
        self.now = now

    def __call__(self):
        return self.now


def ask(engine, clock, at):
    clock.now += (100 + at) * SECOND
    engine.add(str(clock.now), PROMPTS[at], 1)
    engine.drain()


def written(engine):
    """All ages are with the files; no thread is left that writes any."""
    for worker in engine.workers:
        worker._ages[0].close()


def on_disk(engine, clock):
    """Eviction inputs of each block on disk, by its key."""
    index = engine.scheduler.manager.index("disk", now=clock.now)
    keys = [key.tobytes() for key in index.key]
    return dict(zip(keys, zip(index.age.tolist(), index.uses.tolist(), strict=True), strict=True))


def victims(engine, clock):
    """The prompts by the time when their last blocks leave the disk."""
    manager, ranks = engine.scheduler.manager, []
    for at, prompt in enumerate(PROMPTS):
        found = manager.lookup(prompt, now=clock.now)
        assert found.tokens == len(prompt) // SIZE * SIZE
        why = manager.explain(int(found.handles[-1]), now=clock.now, tier="disk")
        ranks.append((why.rank, at))
    return [at for _, at in sorted(ranks)]


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["lru", "retention", "learned"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_kill_the_next_victims_are_those_of_a_server_that_lives(tmp_path, policy, ranks):
    clock, draw = Clock(), random.Random(ranks)
    engine = Engine(tmp_path / "lives", ranks, 0, 0, policy=policy, clock=clock)
    for at in range(8):
        ask(engine, clock, at)
    by_write = victims(engine, clock)
    for _ in range(25):
        ask(engine, clock, draw.randrange(8))
    written(engine)
    shutil.copytree(tmp_path / "lives", tmp_path / "killed")
    killed = Engine(tmp_path / "killed", ranks, 0, 0, policy=policy, clock=clock)
    assert on_disk(killed, clock) == on_disk(engine, clock)
    if policy != "learned":  # counts of lives end with the process
        assert victims(killed, clock) == victims(engine, clock) != by_write
    # And after a second one, of which the first hours were spent elsewhere.
    clock.now += 5000 * SECOND
    ask(killed, clock, 3)
    written(killed)
    shutil.copytree(tmp_path / "killed", tmp_path / "again")
    again = Engine(tmp_path / "again", ranks, 0, 0, policy=policy, clock=clock)
    assert on_disk(again, clock) == on_disk(killed, clock)
    for one in (engine, killed, again):
        one.close()


def of_prompt(engine, clock, prompt):
    """Eviction inputs of each block of a prompt that is on disk, by its key."""
    manager = engine.scheduler.manager
    blocks = manager.lookup(prompt, now=clock.now).handles
    keys = manager.index("disk", now=clock.now, blocks=blocks).key
    every = on_disk(engine, clock)
    return {key.tobytes(): every[key.tobytes()] for key in keys}


def test_a_use_counts_as_it_begins_and_as_it_ends(tmp_path):
    clock = Clock()
    engine = Engine(tmp_path / "lives", 1, 0, 0, clock=clock)
    for at in range(8):
        ask(engine, clock, at)
    clock.now += 100 * SECOND
    engine.add("long", PROMPTS[2], 12)
    while not engine.running:
        engine.step()
    ages = []
    for round_ in range(2):
        clock.now += 50 * SECOND  # within the request, of which nothing is known to have ended
        engine.drain() if round_ else engine.step()
        written(engine)
        shutil.copytree(tmp_path / "lives", tmp_path / f"killed {round_}")
        killed = Engine(tmp_path / f"killed {round_}", 1, 0, 0, clock=clock)
        wanted = of_prompt(engine, clock, PROMPTS[2])
        assert len(wanted) == 4
        assert of_prompt(killed, clock, PROMPTS[2]) == wanted
        ages += [{age for age, _ in wanted.values()}]
        killed.close()
        for worker in engine.workers:
            worker._ages[0] = AgeWriter(worker.disk, 60)
    assert ages == [{50 * SECOND}, {0}]
    engine.close()


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.engines.test_vllm_ages import Clock, Engine, ask, victims, written
clock = Clock()
engine = Engine(sys.argv[1], 1, 0, 0, policy="lru", clock=clock)
for at in (0, 1, 2, 3, 4, 5, 6, 7, 2, 0, 5, 2):
    ask(engine, clock, at)
written(engine)
print(*victims(engine, clock), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL")
def test_a_server_that_is_killed_leaves_its_ages(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path.cwd())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        rows = [int(at) for at in child.stdout.readline().split()]
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert rows == [1, 3, 4, 6, 7, 0, 5, 2]
    clock = Clock(10**7 * SECOND)
    engine = Engine(tmp_path, 1, 0, 0, policy="lru", clock=clock)
    assert victims(engine, clock) == rows
    engine.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_ages_are_right_whatever_happens_to_requests(tmp_path, ahead):
    """Preemption, aborts, two ranks: in the end every age is that of the manager."""
    draw, some = random.Random(ahead), 0
    for seed in range(4):
        clock = Clock()
        folder, copy = tmp_path / f"{seed} lives", tmp_path / f"{seed} killed"
        engine = Engine(folder, 1 + seed % 2, ahead, seed, clock=clock)
        for at in range(20):
            clock.now += draw.randrange(20) * SECOND
            engine.add(str(at), draw.choice(PROMPTS), draw.randint(1, 9))
            for _ in range(draw.randint(0, 4)):
                engine.step()
            everybody = [*engine.running, *engine.waiting]
            if everybody and draw.random() < 0.2:
                engine.finish(draw.choice(everybody))
        engine.drain()
        for at in range(8):  # until here a store may have taken a while
            ask(engine, clock, at)
        written(engine)
        shutil.copytree(folder, copy)
        again = Engine(copy, 1 + seed % 2, ahead, seed, clock=clock)
        ages, found = on_disk(engine, clock), on_disk(again, clock)
        assert found.keys() == ages.keys()
        for prompt in PROMPTS:
            wanted = of_prompt(engine, clock, prompt)
            assert {key: found[key] for key in wanted} == wanted
            some += len(wanted)
        again.close()
        engine.close()
    assert some > 50


# ------------------------------------------------------------------------------------ its pieces


def manager_with(blocks):
    tiers = [Tier("gpu", blocks=4), Tier("disk", blocks=blocks)]
    return BlockManager(ModelShape(1, 1, 2, fingerprint="used"), tiers, block_tokens=2)


def marked(manager, tier, first, count):
    tokens = [number for at in range(count) for number in (first + at, 0)]
    return manager.mark(tokens, tier, present=True, now=0)


def test_uses_wait_for_their_time_or_for_an_idle_server():
    manager = manager_with(64)
    used = UsedBlocks(manager, 1, at_once=4)
    blocks = marked(manager, "disk", 0, 6)
    used.use(blocks[:2])
    assert len(used.take(1 * SECOND, idle=False)) == 2
    assert len(used) == 0
    used.use(blocks)
    assert len(used.take(5 * SECOND, idle=False)) == 0
    rows = list(used.take(6 * SECOND, idle=False))
    assert len(rows) == 4
    assert len(used) == 2
    rows += list(used.take(6 * SECOND, idle=False))  # the rest of it comes with the next step
    assert [row[1:] for row in rows] == [(slot, 0, 1) for slot in range(6)]
    assert (Index(rows).age == 6 * SECOND).all()
    used.use(blocks[4:])
    assert len(used.take(7 * SECOND, idle=False)) == 0
    assert len(used.take(7 * SECOND, idle=True)) == 2
    assert len(used.take(100 * SECOND, idle=True)) == 0


def test_uses_are_bounded_and_only_those_of_the_disk_are_returned():
    manager = manager_with(64)
    used = UsedBlocks(manager, 1, most=10)
    gpu, disk = marked(manager, "gpu", 100, 3), marked(manager, "disk", 0, 12)
    for at in range(12):
        used.use(disk[at : at + 1])
    assert len(used) == 10
    used.use(np.concatenate([gpu, disk[10:], disk[10:]]))
    assert len(used) <= 10
    rows = used.take(0, idle=True)
    assert sorted(row[1] for row in rows) == list(range(9, 12))
    nothing = UsedBlocks(manager, None)
    nothing.use(disk)
    assert (len(nothing), len(nothing.take(0, idle=True))) == (0, 0)


class SlowDisk:
    """A disk whose writes wait, and fail where the test says so."""

    def __init__(self):
        self.go, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.seen, self.now = [], 0

    def wall(self):
        self.now += 1
        return self.now

    def note_uses(self, index, wall):
        self.begun.release()
        self.go.acquire()
        if wall == 2:
            raise TransferError("injected")
        self.seen.append((index.slot.tolist(), wall))


def test_who_gives_ages_waits_for_no_device(caplog):
    disk, manager = SlowDisk(), manager_with(200)
    rows = list(manager.index("disk", now=0, blocks=marked(manager, "disk", 0, 100)))
    writer = AgeWriter(disk, 60)
    writer.write([])
    for row in rows:  # the device is in the first one, and 64 may wait
        writer.write([row])
        if row is rows[0]:
            disk.begun.acquire()
    disk.go.release(200)
    writer.close()
    assert disk.seen == [([0], 1), *(([at], at + 1) for at in range(36, 100))]
    writer.close()
    writer = AgeWriter(disk, 60)
    disk.now = 1
    writer.write(rows[:1])
    writer.write(rows[1:2])
    writer.close()
    assert disk.seen[-1] == ([1], 3)
    assert "ages of 1 blocks were not written" in caplog.text


def test_a_device_that_hangs_is_left_behind():
    disk, manager = SlowDisk(), manager_with(9)
    writer = AgeWriter(disk, 0.01)
    writer.write(list(manager.index("disk", now=0, blocks=marked(manager, "disk", 0, 1))))
    disk.begun.acquire()
    writer.close()
    assert disk.seen == []
    disk.go.release()
