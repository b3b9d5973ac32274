"""The hints of a request are read once, and no content of a request raises."""

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.vllm_engine import Engine
from tests.engines.vllm_engine import PlayedRequest as Request

from kvtrie.engines.server.boundary import Boundary
from kvtrie.engines.server.request_hints import (
    FAR,
    MOST_RANGES,
    RequestHints,
    RetainedRange,
    read_hints,
)

LONG = "x" * 70_000


def kvtrie(**section):
    return {"kvtrie": section}


def test_valid_fields_are_read():
    row = {"start": 32, "end": 64, "priority": 80, "ttl_s": 1.5}
    assert read_hints(kvtrie(session="s", end=True, retain=[row, {}])) == RequestHints(
        "s",
        end=True,
        ranges=(RetainedRange(32, 64, 80, 1_500_000_000), RetainedRange(0, FAR, 35, None)),
    )
    assert read_hints(None, "chat") == RequestHints("chat")
    assert read_hints({"do_remote_prefill": True}) == RequestHints()


@pytest.mark.parametrize(
    "section",
    [
        {"retain": [[]]},
        {"retain": [""]},
        {"retain": 5},
        {"retain": "x"},
        {"retain": [{"ttl_s": 1e300}]},
        {"retain": [{"ttl_s": math.nan}]},
        {"retain": [{"ttl_s": 0}]},
        {"retain": [{"priority": 2**63 - 1}]},
        {"retain": [{"start": 2**63}]},
        {"retain": [{"start": 3, "end": 2}]},
        {"retain": [{"begin": 3}]},
        {"session": 5},
        {"session": [1]},
        {"session": LONG},
        {"session": "x" * 257},
        {"session": "é" * 129},
        {"session": "\ud800"},
        {"end": "yes"},
        {"conversation": "x"},
    ],
)
def test_each_wrong_field_is_named_and_left_out(section):
    hints = read_hints({"kvtrie": section})
    assert len(hints.ignored) == 1
    assert len(hints.ignored[0]) < 300
    assert (hints.session, hints.end, hints.ranges) == (None, False, ())


def test_a_wrong_range_leaves_the_others():
    hints = read_hints(kvtrie(retain=[{"priority": 1}, {"priority": 101}, {"priority": 2}]))
    assert [ranges.priority for ranges in hints.ranges] == [1, 2]
    assert len(read_hints(kvtrie(retain=[{}] * 10_000)).ranges) == MOST_RANGES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROW = st.fixed_dictionaries({}, optional=dict.fromkeys(("start", "end", "priority", "ttl_s"), JSON))
SECTION = st.fixed_dictionaries(
    {}, optional={"session": JSON, "end": JSON, "retain": JSON | st.lists(ROW | JSON, max_size=3)}
)


@given(params=JSON | st.fixed_dictionaries({"kvtrie": SECTION | JSON}), session=JSON)
@settings(max_examples=200, deadline=None)
def test_reading_raises_nothing(params, session):
    read_hints(params, session)


def test_logging_is_bounded_and_counts_what_it_drops(caplog):
    now = [0]
    boundary = Boundary("kvtrie", logging.getLogger("vllm.kvtrie"), lambda: now[0])
    for _ in range(8):
        with boundary.contained("r"):
            raise ValueError("odd")
    assert len(caplog.records) == 5
    assert "test_request_hints.py" in caplog.messages[0]  # the calls that led there
    now[0] = 61_000_000_000
    with boundary.contained("r"):
        raise ValueError("odd")
    assert "3 more were not logged" in caplog.records[-1].getMessage()
    assert boundary.failures == 9


class Failing:
    """A manager one of whose methods raises once."""

    def __init__(self, manager, name):
        self.manager, self.name = manager, name

    def __getattr__(self, name):
        if name == self.name:
            self.name = ""
            raise RuntimeError("unexpected")
        return getattr(self.manager, name)


@pytest.mark.parametrize("name", ["lookup", "acquire", "hint"])
def test_an_unexpected_error_takes_one_request_out_of_the_cache(name):
    engine = Engine("", 1, 0, 1, host=16)
    manager = engine.scheduler.manager
    engine.scheduler.cache.manager = Failing(manager, name)
    odd = Request("odd", [1] * 12, 12, 1)
    odd.priority = -5
    engine.waiting.append(odd)
    engine.add("next", [2] * 12, 1)
    engine.drain()
    engine.scheduler.cache.manager = manager
    assert engine.scheduler.cache.counters.lost["an unexpected error"] == 1
    for request, found in (("a", 0), ("b", 12)):
        tokens = [1 + (request == "b")] * 13
        assert engine.scheduler.match(Request(request, tokens, 13, 1), 0) == found
    manager.audit()
    engine.close()


@pytest.mark.parametrize("salt", ["\ud800", LONG])
def test_a_scope_that_cannot_be_formed_neither_matches_nor_stores(salt):
    engine = Engine("", 1, 0, 1, host=16)
    odd = Request("odd", [1] * 12, 12, 1)
    odd.cache_salt = salt
    engine.waiting.append(odd)
    engine.drain()
    assert engine.scheduler.cache.counters.lost["a scope that cannot be formed"] == 1
    assert engine.scheduler.manager.stats().blocks == 0
    engine.scheduler.manager.audit()
    engine.close()
