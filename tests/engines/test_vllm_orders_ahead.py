"""Blocks are stored by the step that fills them, whatever vLLM does with their slots afterwards."""

import pytest
from tests.engines.vllm_engine import (
    BLOCKS,
    PROMPT,
    SIZE,
    PlayedRequest,
    make_engine,
    planned,
    stores,
)

from kvtrie.engines.vllm.messages import StepNews


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_step_of_a_request_stores_what_it_fills(ranks):
    one = make_engine(ranks=ranks)
    one.add("one", PROMPT, 0)
    one.plan()
    assert stores(one.under_way[0][0]) == (0, 3)
    one.execute()
    assert one.served == 1
    # Its copies are done, and vLLM gives its slots to the next request at once.
    assert (one.scheduler.cache.moves.dispatch.pending, one.scheduler.manager.stats().moves) == (
        0,
        0,
    )
    one.add("two", [7] * (SIZE * (BLOCKS - 1) - 1), 0)
    one.plan()
    assert len(one.blocks.free) == 0
    assert stores(one.under_way[0][0]) == (0, 12)
    one.execute()
    assert one.on_host(PROMPT) == [0, 1, 2]
    assert sum(one.scheduler.cache.counters.lost.values()) == 0
    one.drain()
    one.close()


def test_who_is_aborted_while_a_step_is_under_way_keeps_no_room():
    one = make_engine(ahead=1)
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
    one = make_engine()
    one.add("one", PROMPT, 0)
    one.add("two", PROMPT, 0)
    one.step()
    one.drain()
    assert one.on_host(PROMPT) == [0, 1, 2]
    assert one.scheduler.manager.stats().tiers["host"].free == 13
    one.close()


def test_requests_in_the_same_slots_are_stored_once():
    one = make_engine()
    first, second = (PlayedRequest(name, list(PROMPT), len(PROMPT), 1) for name in "ab")
    for request in (first, second):
        assert one.scheduler.match(request, 0) == 0
        one.scheduler.admit(request, [[1, 2, 3, 4]], 0)
    orders = one.scheduler.orders(planned({"a": 13, "b": 13}))
    assert stores(orders) == (0, 3)


def test_drafts_are_stored_once_they_are_accepted():
    one = make_engine()
    request = PlayedRequest("one", list(PROMPT[:6]), 6, 9)
    one.scheduler.match(request, 0)
    one.scheduler.admit(request, [[1, 2, 3]], 0)
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
    one = make_engine(host=2, folder=tmp_path if deep else "")
    one.add("one", PROMPT, 0)
    one.plan()
    assert stores(one.under_way[0][0]) == (0, 2)
    one.execute()
    one.drain()
    assert one.on_host(PROMPT) == [0, 1]
    assert one.scheduler.cache.counters.lost["no room on host"] == 1
    one.close()
