"""Fates: found, evicted, diverged and new blocks compared with a list of all prompts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.sim.fates import Fates
from kvtrie.sim.trace import TraceRequest

PROMPTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", None]), st.lists(st.integers(0, 2), min_size=1)),
    max_size=20,
)


def ids(prompts):
    """The blocks of prompts as ids of their prefixes."""
    ids = {}
    for session, text in prompts:
        path = [ids.setdefault(tuple(text[: n + 1]), len(ids)) for n in range(len(text))]
        blocks = np.array(path, dtype=np.uint32)
        yield TraceRequest(0, len(path), 1, blocks, session)


@given(PROMPTS, st.data())
def test_every_block_has_one_fate(prompts, data):
    fates, seen, evicted, diverged, hits = Fates(), set(), 0, 0, 0
    before = {}
    for request in ids(prompts):
        path = request.blocks.tolist()
        repeated = sum(block in seen for block in path)
        found = data.draw(st.integers(0, repeated))
        fates.add(request, found)
        evicted, hits = evicted + repeated - found, hits + found
        last = before.get(request.session, []) if request.session else []
        pairs = zip(last, path, strict=False)
        diverged += sum(old != new and new not in seen for old, new in pairs)
        before[request.session] = path
        seen.update(path)
    assert fates.evicted == evicted
    assert fates.diverged == (diverged if {"a", "b"} & set(before) else None)
    assert sum(row.hits for row in fates.turns()) == hits
    assert sum(row.blocks for row in fates.turns()) == sum(len(text) for _, text in prompts)


def test_a_turn_is_one_more_than_that_of_the_path_it_extends():
    fates = Fates()
    texts = ["s", "sab", "sab", "sabc", "sabcd", "sx", "y"]
    for request in ids([(None, list(text)) for text in texts]):
        fates.add(request, 0)
    assert [(row.turn, row.requests) for row in fates.turns()] == [(1, 2), (2, 3), (3, 1), (4, 1)]
