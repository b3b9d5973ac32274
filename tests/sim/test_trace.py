"""Traces: what is written is read again, and a wrong line is named."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie._kvtrie import hashed_line
from kvtrie.errors import ConfigError
from kvtrie.sim import trace
from kvtrie.sim.trace import read_trace, write_trace
from kvtrie.sim.workloads import conversations

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}


def file_of(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


def test_what_is_written_is_read_again(tmp_path):
    made = [replace(made, at=made.at // 10**6 * 10**6) for made in conversations(seed=3)]
    path = tmp_path / "trace.jsonl"
    write_trace(path, made)
    read = read_trace(path)
    assert len(read) == len(made) > 40
    for ours, theirs in zip(read, made, strict=True):
        assert (ours.at, ours.input_tokens, ours.output_tokens) == (
            theirs.at,
            theirs.input_tokens,
            theirs.output_tokens,
        )
        assert ours.blocks.dtype == np.uint32
        assert ours.blocks.tolist() == theirs.blocks.tolist()


def test_fields_have_the_published_names_and_units(tmp_path):
    path = file_of(tmp_path, GOOD, "\n", {**GOOD, "timestamp": 5.5, "chat_id": "x"})
    first, second = read_trace(path)
    assert (first.at, first.input_tokens, first.output_tokens) == (5_000_000, 700, 9)
    assert first.blocks.tolist() == [1, 2]
    assert second.at == 5_500_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": 4}, "before the 5.0 ms"),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": "now"}, "timestamp is 'now'"),
        ({"timestamp": float("nan")}, "timestamp is nan"),
        ({"input_length": 1.5}, "input_length is 1.5"),
        ({"input_length": True}, "input_length is True"),
        ({"output_length": None}, "output_length is None"),
        ({"hash_ids": 7}, "hash_ids is 7"),
        ({"hash_ids": [1, -2]}, r"hash_ids\[1\] is -2"),
        ({"hash_ids": [2**32]}, "4294967296"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path, change, message):
    path = file_of(tmp_path, GOOD, {**GOOD, **change})
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 2: .*{message}"):
        read_trace(path)


NUMBERS = st.one_of(
    st.integers(-2, 2**34),
    st.sampled_from([2**32 - 1, 2**32, 2**63 // 10**6, 2**63 // 10**6 + 1, 2**64, -(2**63)]),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
)
IDS = st.one_of(st.lists(st.one_of(st.integers(0, 2**32 - 1), NUMBERS), max_size=4), NUMBERS)
NAMES = st.one_of(NUMBERS, st.text(), st.just("x" * 65_535), st.just("x" * 65_536))
USUAL = st.fixed_dictionaries(
    {
        "timestamp": st.integers(0, 2**40),
        "input_length": st.integers(0, 2**32 - 1),
        "output_length": st.integers(0, 2**32 - 1),
        "hash_ids": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    },
    optional={"session": st.text(max_size=5), "more": st.lists(st.text())},
)
ODD = st.fixed_dictionaries(
    {},
    optional={
        "timestamp": NUMBERS,
        "input_length": NUMBERS,
        "output_length": NUMBERS,
        "hash_ids": IDS,
        "ranges": st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
        "session": NAMES,
    },
)


def read(path):
    """Result of reading a file of one line: its request, or the error."""
    try:
        (found,) = read_trace(path)
    except ConfigError as error:
        return str(error)
    return found.at, found.input_tokens, found.output_tokens, found.blocks.tolist(), found.session


@given(USUAL, ODD, st.sampled_from(["{}", " {}", "[{}]", "{}x", "\ufeff{}", "\t{}  "]))
def test_a_line_reads_the_same_in_one_call(tmp_path_factory, usual, odd, around):
    path = tmp_path_factory.getbasetemp() / "line.jsonl"
    for row in (usual, {**usual, **odd}):
        path.write_text(around.replace("{}", json.dumps(row)) + "\n")
        quick = read(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "hashed_line", lambda _: None)
            assert read(path) == quick


def test_lines_of_published_traces_are_read_in_one_call():
    assert hashed_line(json.dumps(GOOD)) is not None
    for other in (
        "[5, 700, 9, [1, 2], null, null]",  # the fields in their order
        json.dumps(GOOD)[:-1] + ', "timestamp": 6}',  # of two equal ones Python takes the last
        json.dumps({**GOOD, "session": 7}),
        json.dumps({**GOOD, "ranges": [[0, 1]]}),
    ):
        assert hashed_line(other) is None


@pytest.mark.parametrize("line", ["{", "[1]", "7", '{"timestamp": 1,}'])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    with pytest.raises(ConfigError, match=r"line 3: "):
        read_trace(file_of(tmp_path, GOOD, GOOD, line + "\n"))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "binary")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(file_of(tmp_path, "\n"))


def test_one_seed_makes_one_trace():
    def flat(requests):
        return [(request.at, request.blocks.tolist()) for request in requests]

    assert flat(conversations(seed=5)) == flat(conversations(seed=5))
    assert flat(conversations(seed=5)) != flat(conversations(seed=6))


def test_a_turn_begins_with_the_turn_before():
    requests = conversations(seed=1, chats=10, turns=3, system_blocks=2)
    seen = {(0, 1)}
    longest = 0
    for request in requests:
        path = tuple(request.blocks.tolist())
        before = max(n for n in range(len(path)) if path[:n] in seen)
        assert before >= 2
        assert len(path) - before <= 3
        seen.add(path)
        longest = max(longest, before)
    assert longest > 2
    assert all(a.at <= b.at for a, b in pairwise(requests))


@pytest.mark.parametrize("wrong", [{"chats": 0}, {"turn_blocks": 0}, {"system_blocks": -1}])
def test_a_workload_of_nothing_is_refused(wrong):
    ((name, number),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {number}"):
        conversations(**wrong)
