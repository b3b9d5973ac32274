"""Lines of Mooncake's traces: ids as lists and ranges, and fields that contradict each other."""

import json

import numpy as np
import pytest
from trace_files import AZURE, BURST, rows, write

from kvtrie.errors import ConfigError
from kvtrie.sim.config import TraceSource
from kvtrie.sim.readers.tables import azure_requests, burstgpt_requests
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.trace import read_trace


def test_ranges_are_the_ids_that_they_name(tmp_path):
    path = rows(
        tmp_path,
        {"timestamp": 0, "input_length": 320, "output_length": 1, "ranges": [[3, 6], [9, 11]]},
        {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [4], "session": 7},
        {"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": [4], "session": "x"},
    )
    first, second, third = read_trace(path)
    assert first.blocks.tolist() == [3, 4, 5, 9, 10]
    assert first.blocks.dtype == np.uint32
    assert [each.session for each in (first, second, third)] == [None, "7", "x"]
    source = TraceSource(path, "mooncake", hash_tokens=64)
    assert [row[4] for row in trace_requests(source, 64)] == [None, "7", "x"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranges": []}, r"ranges is \[\]"),
        ({"ranges": [[1, 2, 3]]}, r"ranges\[0\] is \[1, 2, 3\]"),
        ({"ranges": [[1, 3], [5, 5]]}, r"ranges\[1\] is \[5, 5\)"),
        ({"ranges": [[-1, 3]]}, r"ranges\[0\] is \[-1, 3\)"),
        ({"ranges": [[0, 2**33]]}, r"ranges\[0\]"),
        ({"ranges": [[0, 2**31]]}, "more ids than 300 tokens"),
        ({"ranges": [[0, 200], [200, 400]]}, "more ids than 300 tokens"),
        ({"ranges": [[1.0, 2]]}, r"ranges\[0\] is \[1.0, 2\]"),
        ({"ranges": [[1, 2]], "hash_ids": [1]}, "both given"),
        ({"ranges": [[1, 2]], "session": [1]}, "session is"),
    ],
)
def test_a_wrong_range_is_named_with_its_line(tmp_path, change, message):
    line = {"timestamp": 0, "input_length": 300, "output_length": 1, **change}
    good = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        read_trace(rows(tmp_path, good, line))


@pytest.mark.parametrize(
    ("tokens", "hashes", "given", "message"),
    [
        (521, 33, 512, "input_length is 521 in 33 hashes, .* 512 tokens .*: 16 fits"),
        (700, 44, 512, "16 fits"),
        (5000, 1, 512, "4096 fits"),
        (5000, 10, 16, "512 fits"),
        (30, 3, 16, "8 fits"),
        (0, 1, 512, "no number fits"),
        (3, 10, 1, "no number fits"),
    ],
)
def test_a_line_whose_fields_contradict_each_other_names_what_fits(
    tmp_path, tokens, hashes, given, message
):
    line = {"timestamp": 0, "input_length": tokens, "output_length": 1}
    listed = {**line, "hash_ids": list(range(hashes))}
    fits = {**line, "input_length": given, "hash_ids": [1]}
    for last in (listed, {**listed, "session_id": 3}, {**line, "ranges": [[0, hashes]]}):
        source = TraceSource(rows(tmp_path, fits, last), "mooncake", hash_tokens=given)
        with pytest.raises(
            ConfigError, match=f"line 2: .*{message}" if tokens >= hashes else "line 2"
        ):
            list(trace_requests(source, given))


@pytest.mark.parametrize("hashes", [2, 3])
def test_a_last_partial_block_may_have_a_hash_or_none(tmp_path, hashes):
    line = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [*range(hashes)]}
    source = TraceSource(rows(tmp_path, line), "mooncake", hash_tokens=16)
    assert [each[1].tolist() for each in trace_requests(source, 16)] == [line["hash_ids"]]


def test_a_line_claims_no_more_blocks_than_a_tier_holds(tmp_path):
    line = {"timestamp": 0, "input_length": 2**32 - 1, "output_length": 1}
    wide = rows(tmp_path, {**line, "ranges": [[0, 2**32 - 1]]})
    with pytest.raises(ConfigError, match=r"line 1: the prompt has 4294967295 blocks, at most"):
        list(trace_requests(TraceSource(wide, "mooncake", hash_tokens=1), 1))
    with pytest.raises(ConfigError, match="at most 1048576 wanted"):
        read_trace(wide)
    two = rows(tmp_path, {**line, "hash_ids": [0, 1]})
    with pytest.raises(ConfigError, match="has 2 blocks, at most 0 wanted"):
        list(trace_requests(TraceSource(two, "mooncake", hash_tokens=2**31), 1))
    table = write(tmp_path, AZURE.replace(",40,7", ",4294967295,7"))
    with pytest.raises(ConfigError, match="line 2: the prompt has 4294967295 blocks"):
        list(azure_requests(table, 1))
    path = write(tmp_path, BURST.replace(",40,10,", ",40,4294967295,"))
    with pytest.raises(ConfigError, match="line 2: the prompt has 4294967335 blocks"):
        list(burstgpt_requests(path, 1))


def test_fields_that_are_not_read_are_named_once(tmp_path, caplog):
    line = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
    more = {**line, "chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text"}
    path = rows(tmp_path, more, {**more, "session_id": 7})
    for _ in range(2):
        assert [each.session for each in read_trace(path)] == [None, "7"]
    (message,) = caplog.messages
    assert "chat_id, parent_chat_id, turn and type are not read" in message
    caplog.clear()
    read_trace(write(tmp_path, json.dumps({**line, "session": "x", "note": "type"}), "other"))
    assert not caplog.messages
    agents = {"request_id": "r2", "wait_for": ["r1"], "branches": 1, "prefix_reset": True}
    lines = (line, {**line, "delay": 5}, {**line, "delay": 5, **agents, "tool_wait_ms": 500})
    read_trace(write(tmp_path, "".join(json.dumps(row) + "\n" for row in lines), "agents"))
    first, second = caplog.messages
    assert "agents: delay is not read: requests come at their timestamps" in first
    assert "request_id, wait_for, branches, prefix_reset and tool_wait_ms are not read" in second
    with pytest.raises(ConfigError, match="session is 'x' and session_id '7'"):
        read_trace(rows(tmp_path, {**line, "session": "x", "session_id": 7}))
