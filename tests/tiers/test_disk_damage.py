"""Damage and faults of the disk tier: each costs hits, with a reason, and nothing else."""

import faulthandler
import itertools
import logging
import threading

import numpy as np
import pytest
import torch
from keeping import (
    DISK,
    SECOND,
    SHAPE,
    SIZE,
    WALL,
    Clock,
    Damage,
    ask,
    fill,
    open_disk,
    place,
    plant,
    prompt,
    serving,
)

from kvtrie import Index, NoSpaceError
from kvtrie._kvtrie import Faults
from kvtrie.errors import TransferError


def test_five_planted_faults_are_five_misses_with_a_reason(tmp_path, caplog):
    prompts = [prompt(seed) for seed in range(12)]
    fill(tmp_path, prompts)
    slots = place(tmp_path, prompts)
    hit = plant(tmp_path)
    assert len(set().union(*hit.values())) == 6  # of the two swapped neither is in its place
    with caplog.at_level(logging.WARNING, "kvtrie"), serving(tmp_path) as executor:
        assert executor.restore() == len(prompts) - len(hit["unframed"])
        for tokens, slot in zip(prompts, slots, strict=True):
            assert ask(executor, tokens) == (0 if slot in set().union(*hit.values()) else SIZE)
        for name, reason in {
            "flipped": "layer 2 has checksum",
            "blanked": "empty; empty",
            "swapped": "header of slot",
            "cut": "segment-00000 ends at",
        }.items():
            for slot in hit[name]:
                assert f"slot {slot}: " in caplog.text
            assert caplog.text.count(f"{reason}") >= len(hit[name])
        assert "are no frames and were skipped" in caplog.text
        executor.save()
        executor.manager.audit()
    caplog.clear()
    with serving(tmp_path) as executor:  # recomputed blocks are whole again
        assert executor.restore() == len(prompts)
        assert [ask(executor, tokens) for tokens in prompts] == [SIZE] * len(prompts)
    assert caplog.text == ""


def test_every_layer_and_the_middle_of_a_path_are_proved(tmp_path):
    tokens = prompt(1, 3)
    for layer, block in itertools.product(range(SHAPE.layers), range(3)):
        folder = tmp_path / f"{layer} {block}"
        fill(folder, [tokens])
        with serving(folder) as executor:
            executor.restore()
            found = executor.manager.lookup(tokens, now=executor.clock(), keep=0).blocks
        Damage(folder).flip(int(found[block].copies[0].slots[0]), layer)
        with serving(folder) as executor:
            assert executor.restore() == 3
            assert ask(executor, tokens) == block * SIZE  # a prefix: what comes before stays
            executor.manager.audit()


def test_verify_reports_progress_and_removes_damaged_blocks(tmp_path):
    fill(tmp_path, [prompt(seed) for seed in range(12)])
    hit = plant(tmp_path)
    seen = []
    with serving(tmp_path) as executor:
        store = executor.pools[2].store
        found = store.verify(lambda done, total: seen.append((done, total)))
        assert {slot for slot, _, _ in found} == set().union(*hit.values()) - hit["unframed"]
        assert seen == [(done, 11) for done in range(1, 12)]
        assert store.verify() == []
        assert len(store.blocks(WALL)) == 6


KINDS = ("read", "write", "short-read", "short-write", "no-space", "sync")


@pytest.mark.grid
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids="+".join)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_faulty_device_costs_hits_and_nothing_else(tmp_path, kinds, workers):
    faults = Faults(seed=7)
    random = np.random.default_rng(7)
    durability = "fsync" if "sync" in kinds else "flush"
    settings = {"disk": 16, "faults": faults, "durability": durability}
    refused = 0
    with serving(tmp_path, workers=workers, **settings) as executor:
        for kind in kinds:
            faults.inject(kind, per_mille=150)
        for step in range(100):
            tokens = prompt(int(random.integers(16)), int(random.integers(1, 4)))
            try:
                ask(executor, tokens)  # which compares every byte it finds
            except NoSpaceError:  # nothing can leave while the device takes nothing
                refused += 1
                executor.drain()
            if step % 5 == 0:
                executor.manager.audit()
        executor.drain()
        executor.manager.audit()
        assert all(faults.injected(kind) > 0 for kind in kinds)
        assert refused < 5
        faults.heal()
        executor.manager.failed()
        for seed in range(100, 120):
            ask(executor, prompt(seed))
        executor.save()
        assert executor.manager.failed() == []  # the trouble is over
        executor.manager.audit()
    with serving(tmp_path, disk=16) as executor:
        assert executor.restore() > 0
        for seed in (*range(16), *range(100, 120)):
            ask(executor, prompt(seed, 3))
        executor.manager.audit()


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_hanging_device_stops_nobody_beyond_the_deadline(tmp_path, call):
    faults, clock = Faults(), Clock(SECOND)
    prompts = [prompt(seed, 2) for seed in range(8)]
    fill(tmp_path, prompts)
    settings = {"faults": faults, "clock": clock, "deadline_s": 2.0, "workers": 2}
    # Block by block, so that the two of a lease hang both workers.
    with serving(tmp_path, moves_per_job=1, **settings) as executor:
        manager = executor.manager
        executor.restore()
        for seed in range(100, 106):
            ask(executor, prompt(seed, 2))  # gpu and host are full now, and nothing is below
        faults.close_gate([call])
        wanted = prompts[0] if call == "read" else prompt(200, 2)
        lease = manager.acquire(wanted, now=clock(), keep=0, load="all")
        executor.poll()
        faults.wait_for(1)
        while not lease.ready():  # the next one of its victims may hang too
            clock.now += SECOND
            executor.poll()
        assert lease.matched < len(wanted)  # the rest is to be computed
        lease.release()
        assert any("no end after" in row.reason for row in manager.failed())
        manager.audit()
        for _ in range(2):  # blocks that fit above are served as ever
            ask(executor, prompt(100, 2))
        faults.open_gate()
        while executor.poll():  # `drain` does not wait for what is past its deadline
            pass
        manager.audit()
        assert [ask(executor, tokens) for tokens in prompts[1:]] == [2 * SIZE] * 7
        executor.drain()
        manager.audit()


def test_saving_ends_at_the_deadline_when_the_manifest_hangs(tmp_path):
    faults = Faults()
    with serving(tmp_path, faults=faults, deadline_s=30.0) as executor:
        ask(executor, prompt(1, 2))
        executor.save()
        executor.runner.ledger.deadline_ns = SECOND // 100
        faults.close_gate(["write"])
        with pytest.raises(TransferError, match=r"tier 2 \(disk\): 2 blocks .* within 0.010 s"):
            executor.save()
        faults.wait_for(1)
        with pytest.raises(TransferError, match=r"tier 2 \(disk\): an earlier save still hangs"):
            executor.save()
        faults.open_gate()
        executor.runner.ledger.deadline_ns = 30 * SECOND
        call = executor._deadline_calls[2]
        assert call.wait(30 * SECOND)
        ask(executor, prompt(2))
        executor.save()
        executor.manager.audit()
    with serving(tmp_path) as executor:
        assert executor.restore() == 3
        assert [ask(executor, prompt(1, 2)), ask(executor, prompt(2))] == [2 * SIZE, SIZE]


def test_what_goes_wrong_while_saving_is_raised(tmp_path):
    faults = Faults()
    with serving(tmp_path, faults=faults, deadline_s=30.0) as executor:
        ask(executor, prompt(1))
        executor.flush()
        faults.inject("write", per_mille=1000)
        with pytest.raises(TransferError, match="error 5"):
            executor.save()
        faults.heal()
        executor.save()


def test_a_miss_is_answered_while_the_manifest_hangs(tmp_path):
    faults = Faults()
    with open_disk(tmp_path, SHAPE, DISK, SIZE, faults=faults) as storage:
        faults.close_gate(["write"])
        saving = threading.Thread(target=storage.keep, args=(Index(),))
        saving.start()
        faults.wait_for(1)
        faulthandler.dump_traceback_later(60, exit=True)  # nothing else ends a frozen interpreter
        with pytest.raises(TransferError, match="holds nothing"):
            storage.read(bytes(32), 0, (0, 4), torch.empty(4, SIZE * 64, dtype=torch.uint8))
        faulthandler.cancel_dump_traceback_later()
        faults.open_gate()
        saving.join()
