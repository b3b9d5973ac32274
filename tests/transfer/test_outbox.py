"""News of moves on its way out: to the sink or kept, to the callback, and to the log."""

import logging
import threading
from types import SimpleNamespace

import pytest
from rig import SHAPE, SIZE, Time

from kvtrie import Tier
from kvtrie.tiers import Pool
from kvtrie.transfer import outbox as module
from kvtrie.transfer.outbox import Outbox

NEWS = {"layers_done": None, "error": None, "hung": False, "cancelled": False}


def make_outbox(*, pools=(None, None), tiers=(), sink=None, callback=None, threads=()):
    return Outbox(pools, tiers, Time(), sink=sink, callback=callback, threads=threads)


def test_reports_are_kept_and_failed_ids_remembered_where_there_is_no_sink(monkeypatch):
    monkeypatch.setattr(module, "_MOST_FAILED", 2)
    box = make_outbox()
    box.report([1], **NEWS)
    box.report([2, 3, 4], **NEWS | {"error": "no room"})
    assert [one.ids for one in box.take()] == [(1,), (2, 3, 4)]
    assert box.take() == []
    assert [*box.failed] == [3, 4]


def test_a_sink_takes_the_reports_and_nothing_is_kept():
    taken = []
    sink = SimpleNamespace(report=lambda ids, now, **news: taken.append((ids, now, news)))
    box = make_outbox(sink=sink)
    news = NEWS | {"error": "no room"}
    box.report([1], **news)
    assert taken == [([1], Time().now, news)]
    assert not box.take()
    assert not box.failed


def test_a_callback_stops_no_thread_of_the_runner_and_is_logged_once(caplog):
    def interrupted(_):
        raise KeyboardInterrupt

    own = make_outbox(callback=interrupted, threads=[threading.current_thread()])
    for _ in range(2):
        own.progress([1], 1, 4, None, lambda: 1)
    assert len(caplog.records) == 1
    with pytest.raises(KeyboardInterrupt):  # the caller's
        make_outbox(callback=interrupted).progress([1], 1, 4, None, lambda: 1)


@pytest.mark.parametrize(("logs", "lines"), [(True, 0), (False, 1)])
def test_a_failed_store_is_logged_unless_its_storage_does(logs, lines, caplog):
    storage = SimpleNamespace(logs_failures=logs)
    tiers = [Tier("gpu", blocks=4), Tier("disk", blocks=4, path="/nowhere")]
    box = make_outbox(pools=(Pool(SHAPE, 4, SIZE), storage), tiers=tiers)
    store, load = (
        SimpleNamespace(tiers=(0, 1), store=True),
        SimpleNamespace(tiers=(1, 0), store=False),
    )
    with caplog.at_level(logging.WARNING):
        for job in (store, store, load):
            box.warn_of_store(job, "no room")
    assert len(caplog.records) == lines
    assert all(
        "tier 1 (disk) in /nowhere: a block is not stored: no room" in one.getMessage()
        for one in caplog.records
    )
