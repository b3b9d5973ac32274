"""A worker of the vLLM connector copies layer by layer; copies that fail are made again."""

import random

import pytest
import torch
from tests.engines.vllm_engine import PROMPT, Engine, make_engine, play, stores

from kvtrie import Moves
from kvtrie.tiers import Pool
from kvtrie.transfer.report import MoveReport


def test_each_layer_is_on_host_before_the_next_is_computed():
    one = make_engine()
    one.add("one", PROMPT, 0)
    one.plan()
    (orders, rows, tables), (worker,) = one.under_way.popleft(), one.workers
    slots = Moves.from_bytes(orders.ahead[0]).dst_slot
    worker.store(orders)
    worker.load()
    for at, name in enumerate("ab"):
        worker.wait_for_layer(name)
        one.compute(name, one.memory[0][name], rows, tables, set())
        worker.save_layer("of another model")
        worker.save_layer(name)
        for layer in range(2):
            units = worker.host.layer_units(slots.astype(int), layer)
            written = worker.host.planes[0][torch.from_numpy(units)].any(dim=1).tolist()
            assert written == [layer <= at] * 3
        worker.save_layer(name)
        assert MoveReport.from_bytes(worker.news(idle=False).reports or b"[1]") == [
            MoveReport((1, 2, 3))
        ] * (name == "b")
    worker.finish()
    assert worker.news(idle=False).reports == b""
    one.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_that_fail_inside_a_step_are_made_by_the_next(monkeypatch, ranks):
    copy, failed = Pool.copy_from, []

    def fail(self, source, *units):
        if failed.count(self) < 2:  # all together, and the first one by itself
            failed.append(self)
            raise OSError("injected")
        copy(self, source, *units)

    monkeypatch.setattr(Pool, "copy_from", fail)
    one = make_engine(ranks=ranks)
    one.add("one", PROMPT, 0)
    one.plan()
    one.execute()
    assert len(failed) == 2 * ranks
    assert one.on_host(PROMPT) == []
    one.plan()
    assert stores(one.under_way[0][0]) == (1, 0)
    one.execute()
    one.drain()
    assert one.on_host(PROMPT) == [0, 1, 2]
    one.close()


def test_stores_that_fail_at_random_lose_no_block_of_memory(monkeypatch):
    copy, draw = Pool.copy_from, random.Random(0)

    def fail(self, *args):
        if draw.random() < 0.3:
            raise OSError("injected")
        copy(self, *args)

    monkeypatch.setattr(Pool, "copy_from", fail)
    for seed in range(6):
        one = Engine("", 1 + seed % 2, seed % 3, seed)
        play(one, 14, seed)
        one.close()
        host = one.scheduler.manager.stats().tiers["host"]
        assert host.free + host.copies == 6
        assert (one.failed, one.stored_blocks > 0) == (0, True)
