"""`readers.waits`: requests come in a pause after those that they wait for."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import plain, rows, write

from kvtrie.errors import ConfigError
from kvtrie.sim.config import TraceSource, config_of
from kvtrie.sim.readers.hashes import Reading, hash_rows
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.requests import block_requests, trace_requests
from kvtrie.sim.run import run_config
from kvtrie.sim.trace import read_trace

MS = 10**6
# 16 tokens take 16 us, and each further token of an answer 1 us.
TABLES = {
    "model": {"layers": 4, "kv_heads": 1, "head_dim": 64, "dtype": "float16"},
    "manager": {"block_tokens": 16, "policy": "lru"},
    "cost": {"kind": "affine", "ns_per_token": 1000, "alpha": 0.0},
    "tiers": [{"kind": "gpu", "blocks": 1000}],
}


def row(at, hashes, answer=1, **more):
    given = {"input_length": 16 * len(hashes), "output_length": answer, "hash_ids": hashes}
    return {"timestamp": at, **given, **more}


def played(path, engine="serial", **trace):
    source = {"path": str(path), "format": "mooncake", "hash_tokens": 16, **trace}
    lines = []
    run_config(
        config_of({**TABLES, "trace": source, "engine": {"kind": engine}}, path.parent),
        lines.append,
    )
    return lines


def test_a_request_comes_after_its_parents_and_its_pause(tmp_path):
    path = rows(
        tmp_path,
        row(0, [1], 5, request_id="plan", branches=["left", "right"]),
        row(0, [1, 2], 101, request_id="left", wait_for=["plan"]),
        row(0, [1, 3], 1, request_id=7, wait_for=["plan"], tool_wait_ms=0.5),
        row(0, [1, 2, 4], request_id="join", wait_for=["left", 7], tool_wait_ms=3, delay=1),
        row(9, [9], request_id="alone"),
        row(10, [9, 9], wait_for=["plan"], tool_wait_ms=2),
    )
    found = [
        (line["arrival_ns"], line["end_ns"], line["hit_tokens"]["gpu"]) for line in played(path)
    ]
    assert found == [
        (0, 20_000, 0),
        (20_000, 136_000, 16),  # 16 tokens, then 100 more of the answer
        (520_000, 536_000, 16),  # half a millisecond after the plan
        (4_536_000, 4_552_000, 32),  # four milliseconds after the last of both
        (9 * MS, 9 * MS + 16_000, 0),
        (10 * MS, 10 * MS + 16_000, 16),  # its parent has ended long before its time
    ]


def test_a_line_without_a_time_comes_when_its_parents_have_ended(tmp_path):
    second = row(0, [1, 2], wait_for=["a"], tool_wait_ms=7)
    del second["timestamp"]
    path = rows(tmp_path, row(5, [1], request_id="a"), second, row(6, [3]))
    assert [line["arrival_ns"] for line in played(path)] == [5 * MS, 6 * MS, 12 * MS + 16_000]
    with pytest.raises(ConfigError, match="line 1: timestamp is None"):
        list(
            trace_requests(
                TraceSource(rows(tmp_path, second | {"wait_for": []}), "mooncake", hash_tokens=16),
                16,
            )
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"wait_for": ["c"]}, r"wait_for\[0\] is 'c', one that no line above has"),
        ({"wait_for": ["a", "b"], "request_id": "b"}, r"wait_for\[1\] is 'b', itself"),
        ({"wait_for": "a"}, "wait_for is 'a', a list of names"),
        ({"wait_for": [1.5]}, r"wait_for\[0\] is 1.5"),
        ({"wait_for": ["twice"]}, r"wait_for\[0\] is 'twice', the request_id of two lines"),
        ({"wait_for": ["a"], "tool_wait_ms": -1}, "tool_wait_ms is -1"),
        ({"wait_for": ["a"], "tool_wait_ms": float("nan")}, "tool_wait_ms is nan"),
        ({"wait_for": ["a"], "tool_wait_ms": 2**53}, "tool_wait_ms is 9007199254740992, 0 to"),
        ({"wait_for": ["a"], "tool_wait_ms": "5"}, "tool_wait_ms is '5'"),
        ({"wait_for": ["a"], "delay": float("inf")}, "delay is inf"),
        ({"request_id": [1]}, "request_id is"),
    ],
)
def test_a_wait_that_cannot_be_is_named_with_its_line(tmp_path, more, message):
    above = [row(0, [1], request_id=name) for name in ("a", "twice", "twice")]
    path = rows(tmp_path, *above, row(1, [1], **more), row(2, [1], request_id="c"))
    with pytest.raises(ConfigError, match=f"line 4: {message}"):
        list(hash_rows(path, None, Reading(waits=True)))
    skipped = Skipped()
    assert len(list(hash_rows(path, skipped, Reading(waits=True)))) == 4
    assert skipped.lines == 1


def test_requests_that_wait_for_each_other_are_refused(tmp_path):
    path = rows(
        tmp_path, *(row(0, [1], request_id=one, wait_for=[other]) for one, other in ("ab", "ba"))
    )
    with pytest.raises(ConfigError, match=r"line 1: wait_for\[0\] is 'b', one that no line above"):
        played(path)


@settings(max_examples=25)
@given(st.data())
def test_no_request_comes_before_its_time_its_parents_and_its_pause(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "waits.jsonl"
    lines, at = [], 0
    for place in range(data.draw(st.integers(1, 12))):
        at += data.draw(st.sampled_from([0, 0, 1, 30]))
        parents = data.draw(st.lists(st.integers(0, place - 1), max_size=3)) if place else []
        more = {"wait_for": [str(one) for one in parents]} if parents else {}
        pause = data.draw(st.sampled_from([0, 1, 40]))
        more |= {"tool_wait_ms": pause} if pause else {}
        answer = data.draw(st.sampled_from([1, 5, 5_001]))
        lines.append(row(at, [place], answer, request_id=str(place), **more))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Naively: each request takes 16 us and its answer, whatever the others do, on enough machines.
    ends, wanted = [], []
    for line in lines:
        waits = [
            ends[int(one)] + line.get("tool_wait_ms", 0) * MS for one in line.get("wait_for", [])
        ]
        came = max([line["timestamp"] * MS, *waits])
        ends.append(came + 16_000 + 1000 * (line["output_length"] - 1))
        wanted.append((came, ends[-1]))
    source = {"path": str(path), "format": "mooncake", "hash_tokens": 16}
    tables = {**TABLES, "machines": 12, "trace": source, "router": {"kind": "least-loaded"}}
    found = []
    run_config(config_of(tables, path.parent), found.append)
    assert sorted((line["arrival_ns"], line["end_ns"]) for line in found) == sorted(wanted)


def test_what_a_run_does_not_play_is_named_once(tmp_path, caplog):
    first = row(0, [1], request_id="a", prefix_reset=True, branches=["b"], tool_wait_ms=4, delay=2)
    second = row(
        0, [1], request_id="b", wait_for=["a"], tool_wait_ms=4, delay=2, prefix_reset=False
    )
    path = rows(tmp_path, first, second)
    for _ in range(2):
        assert [line["arrival_ns"] for line in played(path)] == [0, 16_000 + 6 * MS]
    (message,) = caplog.messages
    assert "delay, branches, prefix_reset and tool_wait_ms are not read" in message
    assert "or after those of `wait_for`" in message


def test_an_order_before_the_run_has_no_waits_and_says_so(tmp_path, caplog):
    path = rows(
        tmp_path, row(0, [1], request_id="a"), row(0, [1], wait_for=["nobody"], tool_wait_ms=4)
    )
    found = list(block_requests(TraceSource(path, "mooncake", hash_tokens=16), 16))
    assert [(one.at, one.waits) for one in found] == [(0, None), (0, None)]
    assert "request_id is not read" in caplog.messages[0]
    assert (
        "wait_for and tool_wait_ms are not read: requests come at their timestamps,"
        in caplog.messages[1]
    )
    assert len(read_trace(path)) == 2


def test_reports_of_tools_do_not_go_with_waits(tmp_path):
    path = rows(
        tmp_path, row(0, [1], request_id="a", session="x"), row(1, [1], wait_for=["a"], session="x")
    )
    with pytest.raises(ConfigError, match=r"trace\.reports\.number is 2, but request 2 waits"):
        played(path, reports={"number": 2})
    lines = played(path, ends=True, tenants={"number": 2})
    assert [line["arrival_ns"] for line in lines] == [0, MS]


def test_tokens_name_what_they_do_not_read(tmp_path, caplog):
    path = write(tmp_path, '{"arrival_ns": 0, "tokens": [1], "wait_for": ["x"], "delay": 1}\n')
    assert plain(trace_requests(TraceSource(path, "tokens"), 16)) == [(0, [1], 1, 1, None)]
    assert "delay and wait_for are not read" in caplog.text
