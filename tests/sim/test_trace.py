"""Traces: what is written is read again, and a wrong line is named."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtrie._kvtrie import HashLines
from kvtrie.errors import ConfigError
from kvtrie.sim.readers import hashes
from kvtrie.sim.readers.hashes import Reading
from kvtrie.sim.readers.lines import _logged as hashes_logged
from kvtrie.sim.trace import iter_trace, read_trace, write_trace
from kvtrie.sim.workloads import conversations

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}


def file_of(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


def test_what_is_written_is_read_again(tmp_path):
    made = conversations(seed=3)
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
        ({"hash_ids": [2**64]}, "18446744073709551616"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path, change, message):
    path = file_of(tmp_path, GOOD, {**GOOD, **change})
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 2: .*{message}"):
        read_trace(path)


NUMBERS = st.one_of(
    st.integers(-2, 2**34),
    st.sampled_from([2**32 - 1, 2**32, 2**63 // 10**6, 2**63 // 10**6 + 1, 2**64, -(2**63)]),
    st.sampled_from(["7", "0x7", "fF", "1753780607550317897", "2026-09-24T10:00:00Z"]),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
)
IDS = st.one_of(st.lists(st.one_of(st.integers(0, 2**64 - 1), NUMBERS), max_size=4), NUMBERS)
RANGES = st.lists(
    st.one_of(NUMBERS, st.lists(st.one_of(st.integers(0, 9), NUMBERS), max_size=3)), max_size=3
)
NAMES = st.one_of(NUMBERS, st.text(), st.just("x" * 65_535), st.just("x" * 65_536))
USUAL = st.fixed_dictionaries(
    {
        "timestamp": st.integers(0, 2**40),
        "input_length": st.integers(0, 2**32 - 1),
        "output_length": st.integers(0, 2**32 - 1),
        "hash_ids": st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
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
        "ranges": RANGES,
        "session": NAMES,
        "session_id": NAMES,
        "arrival_ns": NUMBERS,
        "request_id": NAMES,
        "wait_for": st.one_of(NUMBERS, st.lists(NAMES, max_size=2)),
        "tool_wait_ms": NUMBERS,
        "delay": NUMBERS,
        "chat_id": NUMBERS,
        "prefix_reset": st.booleans(),
    },
)
LEFT_OUT = st.sets(st.sampled_from(["timestamp", "hash_ids", "output_length"]), max_size=2)


class Unusual:
    """Leaves every line to Python's reader."""

    def __init__(self, **settings):
        self.ids = HashLines(**settings).ids

    def row(self, line):
        del line


def read(path, caplog):
    """Result of reading a file: its requests, or the error, and what was logged."""
    hashes_logged.cache_clear()
    caplog.clear()
    try:
        found = [
            (
                one.at,
                one.input_tokens,
                one.output_tokens,
                one.blocks.tolist(),
                one.session,
                one.waits,
            )
            for one in iter_trace(path, reading=Reading(waits=True))
        ]
    except ConfigError as error:
        found = str(error)
    return found, list(map(set, (line.split() for line in caplog.messages)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(USUAL, ODD, LEFT_OUT, st.sampled_from(["{}", " {}", "[{}]", "{}x", "\ufeff{}", "\t{}  "]))
def test_a_line_reads_the_same_in_one_call(tmp_path_factory, caplog, usual, odd, left, around):
    path = tmp_path_factory.getbasetemp() / "line.jsonl"
    named = {**usual, "timestamp": 0, "request_id": "7"}
    for line in (usual, {key: one for key, one in {**usual, **odd}.items() if key not in left}):
        path.write_text(f"{json.dumps(named)}\n{around.replace('{}', json.dumps(line))}\n")
        quick = read(path, caplog)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hashes, "HashLines", Unusual)
            assert read(path, caplog) == quick


def test_lines_of_published_traces_are_read_in_one_call():
    def row(line):
        return HashLines(most=9, own=2**31, room=2**32).row(line)

    compact = {"arrival_ns": 5, "input_length": 700, "output_length": 9, "ranges": [[1, 3]]}
    for usual in (
        GOOD,
        compact,
        {**compact, "session": 7},
        {**GOOD, "timestamp": "1753780607550317897", "hash_ids": [2**64 - 1, "9f86d081884c7d65"]},
        {**GOOD, "chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text"},
        {**compact, "request_id": "1", "wait_for": ["0"], "tool_wait_ms": 5},
    ):
        assert row(json.dumps(usual)) is not None
    for other in (
        "[5, 700, 9, [1, 2], null, null]",  # the fields in their order
        json.dumps(GOOD)[:-1] + ', "timestamp": 6}',  # of two equal ones Python takes the last
        json.dumps({**GOOD, "session": 7.5}),
        json.dumps({**GOOD, "session_id": "x"}),
        json.dumps({**GOOD, "ranges": [[0, 1]]}),
    ):
        assert row(other) is None


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
