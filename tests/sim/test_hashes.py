"""`readers.hashes`: hashes of 64 bits and texts of digits keep their identity."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_files import plain, rows

from kvtrie.errors import ConfigError
from kvtrie.settings.tier import Tier
from kvtrie.sim.config import TraceSource
from kvtrie.sim.readers.hashes import Reading, hash_rows
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.requests import block_requests, trace_requests
from kvtrie.sim.trace import read_trace

HALF = 2**31
HASHES = st.one_of(
    st.integers(0, 3),
    st.integers(HALF - 2, HALF + 2),
    st.integers(2**32 - 2, 2**32 + 2),
    st.integers(2**64 - 4, 2**64 - 1),
)
FORMS = (lambda one: one, lambda one: f"{one:x}", lambda one: f"0x{one:016X}")


def row(at, hashes, size=512, **more):
    return {
        "timestamp": at,
        "input_length": size * len(hashes),
        "output_length": 1,
        "hash_ids": hashes,
        **more,
    }


@given(
    prompts=st.lists(st.lists(HASHES, min_size=1, max_size=6), min_size=1, max_size=8),
    form=st.sampled_from(FORMS),
    renumber=st.booleans(),
    parts=st.sampled_from([1, 2, 32]),
)
def test_numbered_hashes_are_equal_where_they_were(
    tmp_path_factory, prompts, form, renumber, parts
):
    path = tmp_path_factory.getbasetemp() / "numbered.jsonl"
    lines = [row(at, [form(one) for one in prompt]) for at, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    room = 2**32 // parts
    known, wanted = {}, []
    for prompt in prompts:
        ids = []
        for one in prompt:
            own = 0 if renumber else room // 2
            ids.append(one if one < own else known.setdefault(one, own + len(known)))
        wanted.append(ids)
    reading = Reading(renumber=renumber, parts=parts)
    found = [ids.tolist() for _, ids, *_ in hash_rows(path, None, reading)]
    assert found == wanted
    numbers = {
        one: at
        for prompt, ids in zip(prompts, found, strict=True)
        for one, at in zip(prompt, ids, strict=True)
    }
    assert len(set(numbers.values())) == len(numbers)
    assert max(numbers.values()) < room


@pytest.mark.parametrize(
    ("hashes", "hits"),
    [
        ([[5], [2**32 + 5]], 0),
        ([[2**64 - 1], [2**63 - 1]], 0),
        ([[HALF], [HALF + 1], [HALF]], 1),
        ([[2**64 - 1, 7], [2**64 - 1, 7, 2**40], [2**64 - 1, 2**40]], 3),
        ([["9f86d081884c7d65"], ["9f86d081884c7d64"], ["9F86D081884C7D65"]], 1),
    ],
)
def test_hashes_of_64_bits_are_found_where_they_are_equal(tmp_path, hashes, hits):
    path = rows(tmp_path, *(row(at, one) for at, one in enumerate(hashes)))
    source = TraceSource(path, "mooncake")
    manager = open_manager([Tier("gpu", blocks=100)])
    assert replay(block_requests(source, 512), manager).hits == hits


def test_a_hash_of_many_blocks_leaves_them_room(tmp_path):
    wide = 2**64 - 1
    path = rows(tmp_path, row(0, [wide]), row(1, [3, wide]), row(2, [2**26]))
    found = plain(trace_requests(TraceSource(path, "mooncake"), 16))
    own = 2**26  # half of the ids of 32 blocks each
    blocks = [[*range(one * 32, one * 32 + 32)] for one in (own, 3, own + 1)]
    assert [each[1] for each in found] == [blocks[0], [*blocks[1], *blocks[0]], blocks[2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2**64], r"hash_ids\[0\] is 18446744073709551616, 0 to 18446744073709551615 or a text"),
        ([1, -1], r"hash_ids\[1\] is -1"),
        (["1" * 17], r"hash_ids\[0\] is '11111111111111111'"),
        (["0x"], "'0x'"),
        (["+1"], r"'\+1'"),
        (["1_0"], "'1_0'"),
        ([""], r"hash_ids\[0\] is ''"),
        ([1.0], "1.0"),
        ([None], "None"),
    ],
)
def test_a_value_that_is_no_hash_is_named_with_its_line(tmp_path, given, message):
    path = rows(tmp_path, row(0, [1]), row(1, given))
    with pytest.raises(ConfigError, match=f"line 2: {message}|line 2: .*{message}"):
        read_trace(path)


def test_hashes_without_an_id_left_are_refused_with_their_line(tmp_path):
    path = rows(tmp_path, row(0, [2**32]), row(1, [2**32, 2**33]))
    reading = Reading(parts=2**31)  # ids 0 and 1, of which 1 is for hashes that are numbered
    with pytest.raises(ConfigError, match="line 2: hash_ids: more than 1 distinct hashes of at"):
        list(hash_rows(path, None, reading))


def test_ranges_reach_over_64_bits(tmp_path):
    line = {"timestamp": 0, "input_length": 9, "output_length": 1}
    path = rows(
        tmp_path,
        {**line, "ranges": [[HALF - 1, HALF + 2]]},
        {**line, "ranges": [[2**64 - 2, 2**64]]},
        {**line, "hash_ids": [2**64 - 1, HALF + 1]},
    )
    assert [each.blocks.tolist() for each in read_trace(path)] == [
        [HALF - 1, HALF, HALF + 1],
        [HALF + 2, HALF + 3],
        [HALF + 3, HALF + 1],
    ]
