"""Blocks are stored by the step that fills them, whatever vLLM does with their slots afterwards."""

import random
from types import SimpleNamespace

import pytest
import torch
from tests.engines.vllm_engine import BLOCKS, SIZE, Engine, PlayedRequest, play

from kvtrie import Moves
from kvtrie.engines.vllm.device_reports import DeviceReports
from kvtrie.engines.vllm.messages import StepNews
from kvtrie.tiers import Pool
from kvtrie.transfer.report import MoveReport

PROMPT = list(range(13))  # three full blocks


def engine(host=16, ranks=1, ahead=0, folder=""):
    made = Engine(folder, ranks, ahead, 0, host)
    made.whole = True
    return made


def stores(data):
    """Blocks that are stored at the beginning of a step, and inside it."""
    before = sum(int((Moves.from_bytes(each).src == 0).sum()) for each in data.moves)
    return before, sum(len(Moves.from_bytes(each)) for each in data.ahead)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_step_of_a_request_stores_what_it_fills(ranks):
    one = engine(ranks=ranks)
    one.add("one", PROMPT, 0)
    one.plan()
    assert stores(one.under_way[0][0]) == (0, 3)
    one.execute()
    assert one.served == 1
    # Its copies are done, and vLLM gives its slots to the next request at once.
    assert (one.scheduler.dispatch.pending, one.scheduler.manager.stats().moves) == (0, 0)
    one.add("two", [7] * (SIZE * (BLOCKS - 1) - 1), 0)
    one.plan()
    assert len(one.free) == 0
    assert stores(one.under_way[0][0]) == (0, 12)
    one.execute()
    assert one.on_host(PROMPT) == [0, 1, 2]
    assert sum(one.scheduler.counters.lost.values()) == 0
    one.drain()
    one.close()


def test_each_layer_is_on_host_before_the_next_is_computed():
    one = engine()
    one.add("one", PROMPT, 0)
    one.plan()
    (orders, rows, tables), (worker,) = one.under_way.popleft(), one.workers
    slots = Moves.from_bytes(orders.ahead[0]).dst_slot
    worker.store(orders)
    worker.load()
    for at, name in enumerate("ab"):
        worker.wait_for_layer(name)
        one.compute(one.memory[0][name], rows, tables, set())
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


def test_who_is_aborted_while_a_step_is_under_way_keeps_no_room():
    one = engine(ahead=1)
    one.add("one", PROMPT, 4)
    one.step()
    assert len(one.under_way) == 1
    one.finish(one.running[0])
    one.add("two", [7] * (SIZE * (BLOCKS - 1) - 1), 0)
    one.step()
    one.drain()
    assert one.on_host(PROMPT) == []  # its writes were not yet reported
    host = one.scheduler.manager.stats().tiers["host"]
    assert (host.free + host.copies, one.scheduler.manager.stats().moves) == (16, 0)
    one.close()


def test_of_one_new_prefix_that_two_requests_compute_one_copy_stays():
    one = engine()
    one.add("one", PROMPT, 0)
    one.add("two", PROMPT, 0)
    one.step()
    one.drain()
    assert one.on_host(PROMPT) == [0, 1, 2]
    assert one.scheduler.manager.stats().tiers["host"].free == 13
    one.close()


def test_requests_in_the_same_slots_are_stored_once():
    one = engine()
    first, second = (PlayedRequest(name, list(PROMPT), len(PROMPT), 1) for name in "ab")
    for request in (first, second):
        assert one.scheduler.match(request, 0) == 0
        one.scheduler.admit(request, [1, 2, 3, 4], 0)
    orders = one.scheduler.orders(planned({"a": 13, "b": 13}))
    assert stores(orders) == (0, 3)


def planned(counts, before=0, drafts=None):
    """The output of vLLM's scheduler for requests with these computed tokens."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before) for name in counts
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
        scheduled_spec_decode_tokens=drafts or {},
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )


def test_drafts_are_stored_once_they_are_accepted():
    one = engine()
    request = PlayedRequest("one", list(PROMPT[:6]), 6, 9)
    one.scheduler.match(request, 0)
    one.scheduler.admit(request, [1, 2, 3], 0)
    assert stores(one.scheduler.orders(planned({"one": 6}))) == (0, 1)
    one.scheduler.on_reports({0: StepNews(0, b"")})
    request.all_token_ids.append(6)
    drafted = planned({"one": 4}, 6, {"one": [9, 9, 9]})
    assert stores(one.scheduler.orders(drafted)) == (0, 0)  # position 7 may not be what was drafted
    request.all_token_ids += [7, 8]  # one of them was right
    one.scheduler.on_reports({0: StepNews(1, b"")})
    assert stores(one.scheduler.orders(planned({"one": 1}, 8))) == (0, 1)
    assert stores(one.scheduler.orders(planned({"one": 0}, 9))) == (0, 0)


@pytest.mark.parametrize("deep", [False, True])
def test_what_has_no_room_is_stored_by_the_next_step_or_counted(tmp_path, deep):
    one = engine(host=2, folder=tmp_path if deep else "")
    one.add("one", PROMPT, 0)
    one.plan()
    assert stores(one.under_way[0][0]) == (0, 2)
    one.execute()
    one.drain()
    assert one.on_host(PROMPT) == [0, 1]
    assert one.scheduler.counters.lost["no room on host"] == 1
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
    one = engine(ranks=ranks)
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


class Event:
    """A device's event, which completes when the test sets it."""

    def __init__(self):
        self.passed = False

    def record(self, stream):
        assert stream == "the stream"

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


def test_reports_wait_for_the_device_that_copies(monkeypatch):
    events = []

    def made():
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(torch.cuda, "Event", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the stream")
    reports = DeviceReports(torch.device("cuda", 0))
    one, two, three = ([MoveReport((at,))] for at in range(3))
    reports.add([])
    reports.add(one)
    reports.add(two)
    assert (len(events), reports.take()) == (2, [])
    events[1].passed = True
    assert reports.take() == []  # in order
    events[0].passed = True
    assert reports.take() == one + two
    reports.add(three)
    assert reports.take(wait=True) == three
    assert events[2].passed
    near = DeviceReports(torch.device("cpu"))
    near.add(one)
    assert (near.take(), near.take(), len(events)) == (one, [], 3)
