"""Requests are rebuilt from the blocks that an engine stored."""

import numpy as np
import pytest
from stock_engine import StockEngine

from kvtrie.advise import rebuild
from kvtrie.advise.rebuild import Rebuilt
from kvtrie.advise.wire import Batch, Stored
from kvtrie.errors import ConfigError
from kvtrie.sim.workloads import FAMILIES

SIZE = 16


def steps(*rows):
    """Batches with one stored event each, from `(seconds, blocks, parent[, session])`."""
    return [
        Batch(number, at, [Stored(blocks, parent, SIZE, *session)])
        for number, (at, blocks, parent, *session) in enumerate(rows)
    ]


def rebuilt(*rows):
    """Prompt and answer of each request, by the blocks' names."""
    found = Rebuilt()
    for batch in steps(*rows):
        found.add(batch)
    names = {number: name for name, number in found._ids.items()}

    def named(blocks):
        return [] if blocks is None else [names[block] for block in blocks.tolist()]

    return [(named(one.blocks), named(one.answer)) for one in found.requests()]


def test_ancestors_of_the_first_stored_block_are_the_hits():
    assert rebuilt((0, [1, 2, 3], None), (50, [4, 5], 2)) == [([1, 2, 3], []), ([1, 2, 4, 5], [])]


def test_chunks_of_a_prefill_and_decoded_blocks_are_one_request():
    chunks = (0, [1, 2], None), (1, [3, 4], 2), (3, [5], 4), (20, [6], 5)
    assert rebuilt(*chunks) == [([1, 2, 3, 4], [5, 6])]


def test_the_partial_block_of_a_prompt_counts_as_half_a_block():
    found = Rebuilt()
    for batch in steps((0, [1, 2, 3], None), (50, [4, 5], 2)):
        found.add(batch)
    assert [one.input_tokens for one in found.requests()] == [3.5 * SIZE, 4.5 * SIZE]


def test_several_blocks_after_a_pause_are_the_next_turn():
    turns = (0, [1, 2], None), (1, [3], 2), (1 + rebuild.TURN_S + 0.1, [4, 5], 3)
    assert rebuilt(*turns) == [([1, 2], [3]), ([1, 2, 3, 4, 5], [])]


def test_a_long_pause_ends_a_request():
    assert rebuilt((0, [1], None), (rebuild.PAUSE_S, [2], 1)) == [([1], []), ([1, 2], [])]


def test_another_session_is_another_request():
    assert rebuilt((0, [1], None, "a"), (0, [2, 3], 1, "b")) == [([1], []), ([1, 2, 3], [])]


def test_a_block_that_left_and_comes_again_keeps_its_place():
    again = rebuilt((0, [1, 2], None), (60, [2, 3], 1), (120, [1, 2, 4], None))
    assert again == [([1, 2], []), ([1, 2, 3], []), ([1, 2, 4], [])]


def test_an_unknown_parent_begins_a_path_and_is_counted():
    found = Rebuilt()
    for batch in steps((0, [2, 3], 1), (60, [4], 3)):
        found.add(batch)
    assert found.unknown == 1
    assert [len(one.blocks) for one in found.requests()] == [3, 4]


@pytest.mark.parametrize("chunk", [3, 10**9])
@pytest.mark.parametrize("name", ["chats", "agents"])
def test_prompts_of_an_engine_come_back(name, chunk):
    requests = FAMILIES[name](requests=300)
    # A minute apart, so that no two requests can be taken for one.
    apart = [
        type(one)(60 * 10**9 * at, one.input_tokens, 1, one.blocks)
        for at, one in enumerate(requests)
    ]
    engine, found = StockEngine(400, 512, chunk), Rebuilt()
    for batch in engine.batches(apart):
        found.add(batch)
    whole = [one.input_tokens // 512 for one in apart]
    seen = [full for full, hits in zip(whole, engine.hits, strict=True) if full > hits]
    lengths = [(len(one.blocks), one.output_tokens // 512) for one in found.requests()]
    assert [sum(length) for length in lengths] == seen
    # A last chunk of one block looks like a decoded one.
    assert {answer for _, answer in lengths} <= ({0} if chunk > max(whole) else {0, 1})
    assert found.resident == min(400, found.distinct)
    assert found.unknown == 0


def test_the_oldest_requests_are_forgotten_for_room():
    requests = FAMILIES["chats"](requests=400)
    apart = [
        type(one)(60 * 10**9 * at, one.input_tokens, 1, one.blocks)
        for at, one in enumerate(requests)
    ]
    few, all_of_them = Rebuilt(most=600), Rebuilt()
    for found in (few, all_of_them):
        for batch in StockEngine(100, 512).batches(apart):
            found.add(batch)
    assert few.distinct <= 600 < all_of_them.distinct
    assert few.forgotten > 0
    assert few.forgotten + len(few) == len(all_of_them)
    last = list(all_of_them.requests())[few.forgotten :]
    for one, other in zip(few.requests(), last, strict=True):
        assert (one.at, one.input_tokens) == (other.at, other.input_tokens)
        assert len(np.unique(one.blocks)) == len(one.blocks)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Batch(1, 0.0, [Stored([3], 2, 32)]), "blocks of 32 tokens, those before have 16"),
        (Batch(0, 0.0, [Stored([3], 2, SIZE)]), "several publishers on one endpoint"),
        (Batch(1, 0.0, [Stored([3], 2, SIZE)], rank=1), "several publishers on one endpoint"),
        (Batch(1, -9.0, [Stored([3], 2, SIZE)]), "clock went back from 0.000 s to -9.000 s"),
    ],
)
def test_batches_that_cannot_be_are_refused(second, message):
    found = Rebuilt()
    found.add(Batch(0, 0.0, [Stored([1, 2], None, SIZE)]))
    with pytest.raises(ConfigError, match=message):
        found.add(second)


def test_missing_numbers_are_kept_as_an_interval():
    found = Rebuilt()
    found.add(Batch(3, 0.0))
    found.add(Batch(7, 0.0))
    assert found.lost == [(4, 6)]
