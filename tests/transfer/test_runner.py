"""A runner without a manager: moves come as data, and every one of them is reported once."""

import multiprocessing
import pickle
import threading

import numpy as np
import pytest
from remote import serve
from rig import SHAPE, SIZE, Gate, Time, prompt, working, world

from kvtrie import ModelShape, Moves
from kvtrie.errors import ConfigError, TransferError
from kvtrie.tiers import Pool
from kvtrie.transfer import Runner

SECOND = 1_000_000_000


def stores(blocks=3):
    """A manager that has handed out the stores of some blocks, and these moves."""
    manager, _ = world(gpu=blocks, host=12)
    with manager.acquire(prompt(1, blocks), now=1) as lease:
        lease.commit(prompt(1, blocks), now=1)
    manager.acquire(prompt(2, blocks), now=2).release()
    moves = manager.moves()
    assert moves.kind.tolist() == [Moves.STORE] * blocks
    return manager, moves


def ends(runner):
    """Wait for every move; what was reported, by id, but for progress."""
    return by_id(runner.drain())


def by_id(news):
    return {ident: one for one in news if one.layers_done is None for ident in one.ids}


def complete(manager, news, now):
    """Pass a runner's reports to a manager: their fields are `complete`'s arguments."""
    for one in news:
        manager.complete(
            one.ids,
            now=now,
            ok=one.ok,
            layers_done=one.layers_done,
            error=one.error,
            hung=one.hung,
            cancelled=one.cancelled,
        )


def test_moves_of_a_manager_are_carried_out_in_another_process():
    manager, _ = world(gpu=3, host=12)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    worker = spawn.Process(target=serve, args=(theirs, 3, 12), daemon=True)
    worker.start()
    theirs.close()
    steps = []

    def ask(*what):
        ours.send(what)
        assert ours.poll(60)
        return ours.recv()

    def pump(lease):
        while not lease.ready() or manager.stats().moves:
            moves = manager.moves()
            assert len(moves)
            news = ask("carry", moves.to_bytes())
            steps.extend(one.layers_done for one in news)
            complete(manager, news, now=5)

    written = {}
    for seed in range(3):
        with manager.acquire(prompt(seed, 3), now=seed, keep=0) as lease:
            pump(lease)
            slots = lease.slots(0).tolist()
            kv = np.random.default_rng(seed).integers(0, 256, (3, 4, 256), dtype=np.uint8)
            ask("write", slots, kv)
            lease.commit(prompt(seed, 3), now=seed)
            written[seed] = kv
    for seed in (0, 2, 1):
        with manager.acquire(prompt(seed, 3), now=9, keep=0, load="all") as lease:
            assert lease.matched == 12
            pump(lease)
            assert np.array_equal(ask("read", lease.slots(0).tolist()), written[seed])
    assert manager.failed() == []
    assert {1, 2, 3, None} == set(steps)  # layers, and ends
    manager.audit()
    ours.close()
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tier_that_no_pool_has_fails_the_move(workers):
    for pools in ([Pool(SHAPE, 3, SIZE)], [Pool(SHAPE, 3, SIZE), None], [None, None]):
        manager, moves = stores()
        with Runner(pools, workers=workers) as runner:
            runner.submit(pickle.loads(pickle.dumps(moves)))  # noqa: S301
            news = runner.reports()
        assert by_id(news).keys() == set(moves.id.tolist())
        assert all("no pool for tier" in one.error and not one.cancelled for one in news)
        complete(manager, news, now=3)
        assert manager.stats().moves == 0
        manager.audit()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_slot_that_the_pool_does_not_have_fails_only_that_move(side):
    _, moves = stores()
    small = Pool(SHAPE, 2, SIZE)
    pools = [small, Pool(SHAPE, 12, SIZE)] if side == "source" else [Pool(SHAPE, 3, SIZE), small]
    slots = moves.src_slot if side == "source" else moves.dst_slot
    with Runner(pools) as runner:
        runner.submit(moves)
        found = ends(runner)
    tier = 0 if side == "source" else 1
    for ident, slot in zip(moves.id.tolist(), slots.tolist(), strict=True):
        wrong = None if slot < 2 else f"slot {slot} of tier {tier}, whose pool has 2"
        assert found[ident].error == wrong
    assert sum(not one.ok for one in found.values()) == 1


def test_layers_that_the_pool_does_not_have_fail_the_move():
    _, moves = stores()
    low = ModelShape(layers=2, kv_heads=2, head_dim=4)
    with Runner([Pool(low, 3, SIZE), Pool(low, 12, SIZE)]) as runner:
        runner.submit(moves)
        assert {one.error for one in runner.reports()} == {"layer 3 of 2 on tier 1"}
    wide = [Pool(SHAPE, 3, SIZE), Pool(SHAPE, 12, SIZE, layer_slots=True)]
    with Runner(wide) as runner:
        runner.submit(moves)
        assert {one.error for one in runner.reports()} == {
            "several layers in one layer slot of tier 1"
        }


def test_a_storage_that_raises_fails_its_move_and_no_thread():
    class Torn:
        def write(self, key, slot, layers, memory, label):  # noqa: ARG002
            if slot % 2:
                raise SystemExit(f"slot {slot} is torn")

        def read(self, key, slot, layers, memory): ...

    _, moves = stores()
    with Runner([Pool(SHAPE, 3, SIZE), Torn()], workers=1) as runner:
        runner.submit(moves)
        found = ends(runner)
        for ident, slot in zip(moves.id.tolist(), moves.dst_slot.tolist(), strict=True):
            wrong = f"SystemExit: slot {slot} is torn"
            assert found[ident].error == (wrong if slot % 2 else None)
        assert all(thread.is_alive() for thread in runner.threads)


@pytest.mark.parametrize("together", [True, False])
def test_a_move_whose_first_has_failed_is_reported_and_never_copied(together):
    """Loads into slots that stores leave: the stores fail here, before or after the loads come."""
    manager, moves = stores()
    manager.complete(moves.id, now=2)
    with manager.acquire(prompt(2, 3), now=3) as lease:
        manager.complete(manager.moves().id, now=3)
        lease.commit(prompt(2, 3), now=3)
    lease = manager.acquire(prompt(1, 3), now=4, keep=0, load="all")
    moves = manager.moves()
    down, up = moves[moves.kind == Moves.STORE], moves[moves.kind == Moves.LOAD]
    assert (len(down), len(up)) == (3, 3)
    assert set(up.after.tolist()) <= set(down.id.tolist())
    gpu, host = Gate(SHAPE, 3, SIZE), Gate(SHAPE, 12, SIZE)
    host.error = OSError("no room")
    host.open()
    with Runner([gpu, host]) as runner:
        if together:
            runner.submit(moves)
        else:
            runner.submit(down)
        found = ends(runner)
        if not together:
            runner.submit(up)
            found |= by_id(runner.reports())
    assert {found[ident].error for ident in down.id.tolist()} == {"OSError: no room"}
    for ident in up.id.tolist():
        assert (found[ident].error, found[ident].cancelled) == (
            "the move that it waits for has failed",
            True,
        )
    assert gpu.diary == []  # no load has begun
    complete(manager, found.values(), now=5)  # the manager has failed the loads by itself
    assert manager.stats().moves == 0
    lease.release()
    manager.audit()


def test_closing_reports_what_runs_and_what_never_will():
    _, moves = stores()
    host = Gate(SHAPE, 12, SIZE)
    runner = Runner([Pool(SHAPE, 3, SIZE), host], workers=1, moves_per_job=1)
    runner.submit(moves)
    assert host.entered.acquire(timeout=30)
    closer = threading.Thread(target=runner.close)
    closer.start()
    with pytest.raises(TransferError, match="closed"):
        runner.drain()
    host.open()
    closer.join(timeout=30)
    assert not closer.is_alive()
    assert not any(thread.is_alive() for thread in runner.threads)
    found = by_id(runner.reports(wait=True))
    assert [found[ident].error for ident in moves.id.tolist()] == [
        None,
        *["closed before the move started"] * 2,
    ]
    assert not found[moves[0].id].cancelled
    assert found[moves[1].id].cancelled
    with pytest.raises(TransferError, match="closed"):
        runner.submit(moves)
    runner.close()


def test_a_move_that_hangs_is_reported_at_the_deadline_and_when_it_ends():
    _, moves = stores()
    host, clock = Gate(SHAPE, 12, SIZE), Time()
    runner = Runner([Pool(SHAPE, 3, SIZE), host], workers=1, deadline_s=2.0, clock=clock)
    runner.submit(moves)
    assert host.entered.acquire(timeout=30)
    assert runner.reports() == []
    clock.now += 2 * SECOND
    (late,) = runner.reports(wait=True)
    assert (late.ids, late.hung) == (tuple(moves.id.tolist()), True)
    assert late.error == "no end after 2.000 s"
    assert runner.reports(wait=True) == []  # a move that hangs is not waited for
    assert runner.pending == 3
    (thread,) = runner.threads
    runner.close()  # the thread still runs
    host.open()
    thread.join(timeout=30)
    (end,) = runner.reports()
    assert (end.error, end.hung, end.cancelled) == (
        "the move ended past its deadline",
        False,
        False,
    )
    assert runner.pending == 0


def test_a_move_is_submitted_once():
    _, moves = stores()
    host = Gate(SHAPE, 12, SIZE)
    with Runner([Pool(SHAPE, 3, SIZE), host], workers=1, moves_per_job=1) as runner:
        with pytest.raises(ConfigError, match="twice"):
            runner.submit(moves[[0, 0]])
        runner.submit(moves)
        assert host.entered.acquire(timeout=30)
        for again in (moves[:1], moves[2:]):  # one that runs, one that waits
            with pytest.raises(ConfigError, match="here already"):
                runner.submit(again)
        assert runner.cancel(moves.id[2:]) == 1
        host.open()
        found = ends(runner)
    assert [found[ident].error for ident in moves.id.tolist()] == [None, None, "cancelled"]


def test_pools_of_two_formats_are_refused():
    before = working()
    with pytest.raises(ConfigError, match="tier 0 and tier 2 differ: layers 4 and 2"):
        Runner([Pool(SHAPE, 3, SIZE), None, Pool(ModelShape(2, 2, 4), 3, SIZE)])
    assert working() == before


def test_a_runner_that_is_dropped_ends_its_threads():
    threads = Runner([Pool(SHAPE, 3, SIZE)], workers=2).threads
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
