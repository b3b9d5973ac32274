"""The executor: moves become bytes, in the right order, and every one of them is reported."""

from dataclasses import asdict, replace

import pytest
import torch
from rig import SHAPE, SIZE, Gate, Shelf, away, fetch, gated, prompt, rows, store, working, world

from kvtrie import BlockManager, Tier
from kvtrie.errors import ClosedError, ConfigError, TransferError
from kvtrie.model.layout import Layout
from kvtrie.tiers import DiskStorage, Pool, open_pools
from kvtrie.transfer import Executor
from kvtrie.transfer.job import Job

FORMS = [(False, False), (True, True), (True, False)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_kv_comes_back_bit_for_bit(form, workers):
    manager, pools = world(form=form)
    with Executor(manager, pools, workers=workers) as executor:
        prompts = [prompt(seed, 3) for seed in range(3)]
        written = [store(executor, tokens, seed) for seed, tokens in enumerate(prompts)]
        for _ in range(3):
            for tokens, kv in zip(prompts, written, strict=True):
                assert torch.equal(fetch(executor, tokens), kv)
        executor.drain()
        manager.audit()
        assert manager.failed() == []
    assert working() == []


def test_a_disk_takes_part_through_its_storage():
    tiers = [
        Tier("gpu", blocks=4, layer_slots=True),
        Tier("host", blocks=8, layer_slots=True),
        Tier("disk", blocks=24),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    gpu, host, _ = open_pools(SHAPE, tiers, SIZE)
    shelf = Shelf()
    with Executor(manager, [gpu, host, shelf]) as executor:
        prompts = [prompt(seed, 3) for seed in range(6)]
        written = [store(executor, tokens, seed) for seed, tokens in enumerate(prompts)]
        executor.drain()
        assert shelf.units
        for tokens, kv in zip(prompts, written, strict=True):
            assert torch.equal(fetch(executor, tokens), kv)
            executor.drain()


def test_a_move_starts_only_after_the_one_it_names():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    first, second = prompt(1, 3), prompt(2, 3)
    with Executor(manager, pools, workers=2) as executor:
        stored = store(executor, first, 1)
        lease = manager.acquire(second, now=executor.clock())  # its slots are first's
        executor.poll()
        assert host.entered.acquire(timeout=30)  # the store has begun
        assert not lease.ready()
        lease.release()
        # Loading first again needs the slots that the store still reads.
        again = manager.acquire(first, now=executor.clock(), keep=0, load="all")
        before = [plane.clone() for plane in pools[0].planes]
        executor.poll()
        assert all(map(torch.equal, before, pools[0].planes))
        host.leave.release(20)
        executor.wait(again)
        assert torch.equal(
            torch.stack([torch.stack(pools[0].gather(*at)) for at in rows(pools[0], again, 12)]),
            stored,
        )
        again.release()


def test_a_failed_store_leaves_the_block_where_it_was():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    host.error = RuntimeError("no such page")
    host.leave.release(20)
    first = prompt(1, 3)
    with Executor(manager, pools) as executor:
        stored = store(executor, first, 1)
        lease = manager.acquire(prompt(2, 1), now=executor.clock())
        executor.drain()
        failed = manager.failed()
        assert failed
        assert "RuntimeError: no such page" in failed[0].reason
        lease.release()
        executor.drain()
        match = manager.lookup(first, now=executor.clock(), keep=0)
        assert match.tokens >= 8
        assert torch.equal(fetch(executor, first[: match.tokens]), stored[:, :, : match.tokens])
        manager.audit()


def test_a_failed_load_becomes_something_to_compute():
    manager, pools = world(gpu=3)
    gpu = pools[0] = Gate(SHAPE, 3, SIZE)
    first = prompt(1, 3)
    with Executor(manager, pools) as executor:
        gpu.leave.release(20)
        store(executor, first, 1)
        store(executor, prompt(2, 3), 2)
        executor.drain()
        gpu.error = OSError("read error")
        lease = manager.acquire(first, now=executor.clock(), load="all")
        executor.wait(lease)
        assert lease.ready()
        reasons = {row.reason for row in manager.failed() if row.lease == lease.id}
        assert any("OSError: read error" in reason for reason in reasons)
        assert lease.matched == 0  # leaf-only: a prefix or nothing
        lease.release()
        manager.audit()


def test_progress_is_reported_layer_by_layer():
    manager, pools = world(gpu=3, write="through")
    first = prompt(1, 3)
    executor = Executor(manager, pools, workers=0, layers_per_report=1)
    store(executor, first, 1)
    executor.drain()
    store(executor, prompt(2, 3), 2)
    executor.drain()
    lease = manager.acquire(first, now=executor.clock(), keep=0, load="all")
    seen = []
    original = pools[0].copy_from

    def watched(source, source_units, units):
        match = manager.lookup(first, now=executor.clock(), keep=0)
        seen.append([block.copies[0].layer_hi for block in match.blocks])
        original(source, source_units, units)

    pools[0].copy_from = watched
    executor.wait(lease)
    assert seen == [[layer] * 3 for layer in range(SHAPE.layers)]
    lease.release()
    executor.close()


def test_waiting_for_moves_that_somebody_else_took_is_an_error():
    manager, pools = world(gpu=3)
    with Executor(manager, pools) as executor:
        store(executor, prompt(1, 3), 1)
        lease = manager.acquire(prompt(2, 3), now=executor.clock())
        taken = manager.moves()
        assert len(taken)
        with pytest.raises(TransferError, match=f"lease {lease.id} "):
            executor.wait(lease)
        manager.complete(taken.id, now=executor.clock(), ok=False, error="lost")
        lease.release()


def test_a_caller_that_waits_learns_that_the_manager_is_gone():
    manager, pools = world(gpu=3)
    host = pools[1] = Gate(SHAPE, 8, SIZE)
    with Executor(manager, pools, workers=1) as executor:
        store(executor, prompt(1, 3), 1)
        manager.acquire(prompt(2, 3), now=executor.clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)
        manager.close()
        host.leave.release(20)
        with pytest.raises((TransferError, ClosedError)):
            executor.drain()


def test_a_caller_that_waits_learns_that_a_worker_has_stopped(monkeypatch):
    def record_end(self, **_):
        raise RuntimeError(f"{len(self.ids)} moves cannot be noted")

    manager, pools = world(gpu=3, host=12)
    monkeypatch.setattr(Job, "record_end", record_end)
    with Executor(manager, pools, workers=1) as executor:
        store(executor, prompt(1, 3), 1)
        with pytest.raises(TransferError, match="could not report: 3 moves cannot be noted"):
            store(executor, prompt(2, 3), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": -1},
        {"deadline_s": 0.0},
        {"layers_per_report": 0},
        {"moves_per_job": 0},
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong):
    manager, pools = world()
    with pytest.raises(ConfigError):
        Executor(manager, pools, **wrong)


def test_pools_match_the_tiers():
    manager, pools = world()
    for wrong in (pools[:1], [pools[0], None]):
        with pytest.raises(ConfigError, match="1 pools given for 2"):
            Executor(manager, wrong)


@pytest.mark.parametrize(
    ("wrong", "difference"),
    [
        ({"layers": 5}, "layers 4 and 5"),
        ({"kv_heads": 4}, "heads 2 and 4"),
        ({"head_dim": 8}, "head_dim 4 and 8, v_head_dim 4 and 8"),
        ({"dtype": "float16"}, "dtype float32 and float16"),
        ({"size": 2 * SIZE}, "block_tokens 4 and 8"),
        ({"layout": Layout(alignment=512)}, "alignment 1 and 512"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_pools_that_cannot_exchange_bytes_are_refused(kind, wrong, difference, tmp_path):
    manager, (gpu, _) = world(gpu=4)
    layout, size = wrong.get("layout"), wrong.get("size", SIZE)
    shape = replace(SHAPE, **{name: wrong[name] for name in wrong if name in asdict(SHAPE)})
    other = Pool(shape, 12, size, layout=layout)
    if kind == "disk":
        other = DiskStorage(tmp_path, shape, 12, size, layout=layout)
    with pytest.raises(ConfigError) as refused:
        Executor(manager, [gpu, other])
    expected = f"differ: {difference}"
    if kind == "host" and "dtype" in wrong:  # memory converts, but not heads as small as these
        expected = "cannot exchange KV: a head of 4 numbers is no multiple of 8"
    assert str(refused.value) == f"tier 0 (gpu) and tier 1 (host) {expected}"
    if "layout" not in wrong and "dtype" not in wrong:
        with pytest.raises(ConfigError) as refused:
            Executor(manager, [other, other])
        assert str(refused.value) == f"the manager and tier 0 (gpu) differ: {difference}"
    assert working() == []


def test_a_custom_storage_may_declare_its_block_format():
    manager, (gpu, host) = world()
    shelf = Shelf()
    shelf.block_format = replace(gpu.block_format, layers=7)
    with pytest.raises(ConfigError, match=r"layers 4 and 7$"):
        Executor(manager, [gpu, shelf])
    shelf.block_format = host.block_format
    Executor(manager, [gpu, shelf]).close()


def test_a_load_that_a_lease_waits_for_overtakes_stores_that_nobody_waits_for():
    manager, (gpu, host) = gated(write="through")
    wanted = prompt(1, 2)
    with Executor(manager, [gpu, host], workers=1, moves_per_job=1) as executor:
        stored = away(executor, wanted, 1)
        host.shut()
        store(executor, prompt(2, 3), 2)
        executor.poll()
        assert host.entered.acquire(timeout=30)  # the first of three stores runs
        lease = manager.acquire(wanted, now=executor.clock(), keep=0, load="all")
        executor.poll()
        gpu.diary.clear()
        host.open()
        executor.wait(lease)
        executor.drain()
        assert [pool for pool, _ in gpu.diary] == [gpu, gpu, host, host]
        lease.release()
        assert torch.equal(fetch(executor, wanted), stored)


def test_a_store_that_a_load_waits_for_overtakes_the_others():
    manager, (gpu, host) = gated(gpu=8)
    with Executor(manager, [gpu, host], workers=1, moves_per_job=1) as executor:
        wanted = prompt(1, 2)
        stored = away(executor, wanted, 1)
        executor.flush()
        lease_of_front = manager.acquire(prompt(1001, 8)[: 3 * SIZE], now=executor.clock(), keep=0)
        store(executor, prompt(2, 3), 2)
        host.shut()
        manager.flush(now=executor.clock())
        executor.poll()
        assert host.entered.acquire(timeout=30)  # the first of three stores runs
        store(executor, prompt(3, 2), 3)
        lease = manager.acquire(wanted, now=executor.clock(), keep=0, load="all")
        slots = lease.slots(0).tolist()  # two blocks must be written down before they leave them
        executor.poll()
        gpu.diary.clear()
        host.open()
        executor.drain()
        order = [pool is host and source in slots for pool, source in gpu.diary]
        assert order[:2] == [True, True]
        assert [pool for pool, _ in gpu.diary].count(host) == 4
        assert lease.ready()
        lease.release()
        lease_of_front.release()
        assert torch.equal(fetch(executor, wanted), stored)


@pytest.mark.parametrize("polled", [True, False])
def test_cancelling_fails_what_has_not_started_and_blames_nobody(polled):
    manager, (gpu, host) = gated(write="through")
    wanted, running = prompt(1, 2), prompt(2, 1)
    with Executor(manager, [gpu, host], workers=1, moves_per_job=1) as executor:
        stored = away(executor, wanted, 1)
        host.shut()
        also = store(executor, running, 2)
        executor.poll()
        assert host.entered.acquire(timeout=30)
        manager.failed()
        lease = manager.acquire(wanted, now=executor.clock(), keep=0, load="all")
        if polled:
            executor.poll()
        loads = lease.after
        assert (len(loads), lease.matched) == (2, 8)
        assert executor.cancel(loads[1:]) == 1
        assert lease.matched == 4
        assert executor.cancel(loads) == 1
        assert executor.cancel(loads) == 0
        assert executor.cancel() == 0
        assert lease.ready()
        assert lease.matched == 0
        assert {row.reason for row in manager.failed() if row.lease == lease.id} == {"cancelled"}
        lease.release()
        manager.audit()
        host.open()
        executor.drain()
        assert manager.failed() == []
        assert torch.equal(fetch(executor, wanted), stored)
        assert torch.equal(fetch(executor, running), also)


def test_what_waits_for_a_cancelled_move_is_counted():
    manager, (gpu, host) = gated(gpu=2)
    wanted = prompt(1, 2)
    with Executor(manager, [gpu, host], workers=1, moves_per_job=1) as executor:
        away(executor, wanted, 1)
        host.shut()
        # Both slots hold the only copies of their blocks: two stores, and two loads after them.
        lease = manager.acquire(wanted, now=executor.clock(), keep=0, load="all")
        executor.poll()
        assert host.entered.acquire(timeout=30)
        assert executor.cancel() == 3
        host.open()
        executor.wait(lease)
        manager.audit()
        lease.release()


@pytest.mark.parametrize("workers", [0, 1])
def test_progress_is_reported_layer_by_layer_to_the_end(workers):
    manager, pools = gated(gpu=3, write="through")
    wanted, news = prompt(1, 3), []
    with Executor(
        manager, pools, workers=workers, layers_per_report=1, progress=news.append
    ) as executor:
        stored = away(executor, wanted, 1)
        news.clear()
        assert torch.equal(fetch(executor, wanted), stored)
        executor.drain()
        (ids,) = {each.ids for each in news}
        assert len(ids) == 3
        assert [each.layers_done for each in news] == [1, 2, 3, 4]
        assert {(each.layers, each.error) for each in news} == {(SHAPE.layers, None)}
        assert [each.pending for each in news] == [3, 3, 3, 0]

        away(executor, prompt(2, 3), 2)
        news.clear()
        pools[0].error = OSError("no such page")
        with manager.acquire(wanted, now=executor.clock(), load="all") as lease:
            executor.wait(lease)
        executor.drain()
        assert [(each.layers_done, each.error) for each in news] == [(0, "OSError: no such page")]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("layers_per_report", [1, 8])
@pytest.mark.parametrize("raised", [LookupError, SystemExit])
def test_moves_end_though_the_progress_callback_raises(workers, layers_per_report, raised, caplog):
    manager, pools = gated(gpu=3)

    def bad(_):
        raise raised("no such bar")

    with Executor(
        manager,
        pools,
        workers=workers,
        layers_per_report=layers_per_report,
        moves_per_job=1,
        progress=bad,
    ) as executor:
        stored = store(executor, prompt(1, 3), 1)
        store(executor, prompt(2, 3), 2)
        executor.drain()
        assert manager.stats().moves == 0
        assert torch.equal(fetch(executor, prompt(1, 3)), stored)
        executor.drain()
    (warning,) = caplog.records  # once
    assert "no such bar" in warning.message
    assert warning.exc_info[0] is raised
    manager.audit()
