"""What agents' clients write into requests: sessions, markers, results of tools.

`client_requests.json` was recorded from the libraries anthropic 2.12 and openai 3.54.
"""

import json
from pathlib import Path

import pytest

from kvtrie.engines.server.client_fields import (
    Marker,
    Place,
    carries_tool_results,
    cut,
    read_markers,
    session_of,
)

RECORDED = json.loads((Path(__file__).parent / "client_requests.json").read_text())
HOUR, FIVE, HALF, HALF_DAY, DAY = 3600, 300, 1800, 43_200, 86_400
EPHEMERAL = {"type": "ephemeral"}


def read(at):
    one = RECORDED[at]
    body = json.loads(one["body"])
    markers = read_markers(body)
    assert markers.ignored == []
    return session_of(body, one["headers"]), markers.found, carries_tool_results(body)


def test_recorded_requests_have_these_sessions_markers_and_results():
    assert [read(at) for at in range(len(RECORDED))] == [
        (
            "57a121ec-f78c-48c3-a745-e3036a3ecc33",
            [Marker(HOUR, Place("system", 1)), Marker(FIVE)],
            False,
        ),
        (
            "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe",
            [Marker(HOUR, Place("system", 0)), Marker(FIVE)],
            True,
        ),
        (None, [Marker(FIVE)], False),
        ("c0ffee", [Marker(FIVE, Place("messages", 0, 1))], False),
        ("conv-3", [Marker(DAY)], False),
        ("ann", [Marker(HALF_DAY, Place("messages", 0))], True),
        ("conv-4", [Marker(HALF)], False),
        ("s-9", [], True),
        ("bob", [], False),
    ]


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({"session_id": "a", "user": "b"}, {"x-session-id": "c"}, "a"),
        ({"vllm_xargs": {"session_id": "a"}, "user": "b"}, {"x-session-id": "c"}, "c"),
        ({"vllm_xargs": {"session_id": "a"}, "prompt_cache_key": "b"}, {}, "a"),
        ({"metadata": {"session_id": "a", "user_id": "b"}}, {}, "a"),
        ({"metadata": {"user_id": "plain"}}, {}, "plain"),
        ({"metadata": {"user_id": '{"device_id": "d"}'}}, {}, '{"device_id": "d"}'),
        ({"metadata": {"user_id": "{no JSON"}}, {}, "{no JSON"),
        ({"metadata": {"user_id": "[" * 10**5}, "user": "b"}, {}, "[" * 10**5),
        ({"metadata": {"user_id": 3}, "user": "b"}, {}, "b"),
        ({"metadata": [], "prompt_cache_key": "", "user": None}, {}, None),
        ({"session_id": ["a"]}, {}, None),
    ],
)
def test_the_session_is_the_first_name_that_is_a_text(body, headers, session):
    assert session_of(body, headers) == session


def block(text, **more):
    return {"type": "text", "text": text, **more}


def test_a_marker_that_a_later_one_outlasts_does_not_count():
    body = {
        "system": [block("s", cache_control=EPHEMERAL)],
        "messages": [
            {"role": "user", "content": [block("a", cache_control={**EPHEMERAL, "ttl": "1h"})]},
            {"role": "assistant", "content": [block("b", cache_control=EPHEMERAL)]},
            {"role": "user", "content": "c"},
        ],
    }
    assert read_markers(body).found == [
        Marker(HOUR, Place("messages", 0)),
        Marker(FIVE, Place("messages", 1)),
    ]
    body["cache_control"] = EPHEMERAL
    assert read_markers(body).found == [Marker(HOUR, Place("messages", 0)), Marker(FIVE)]
    body["prompt_cache_retention"] = "24h"
    assert read_markers(body).found == [Marker(DAY)]


def test_a_marker_of_a_message_ends_after_the_message():
    said = [{"role": "user", "content": "a", "cache_control": EPHEMERAL}, {"role": "user"}]
    assert read_markers({"messages": said}).found == [Marker(FIVE, Place("messages", 0))]
    assert cut({"messages": said}, Place("messages", 0)) == {"messages": said[:1]}


def test_a_breakpoint_without_a_time_has_that_of_the_request():
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    body = {"input": [{"role": "user", "content": [block("a", **mark), block("b")]}]}
    assert read_markers(body).found == [Marker(HALF, Place("input", 0, 1))]
    body["prompt_cache_options"] = {"mode": "explicit", "ttl": "12h"}
    assert read_markers(body).found == [Marker(HALF_DAY, Place("input", 0, 1))]


def test_a_cut_ends_the_prompt_after_the_marked_block():
    system = {"role": "system", "content": "s"}
    messages = [system, {"role": "user", "content": [block("a"), block("b")]}, {"role": "user"}]
    body = {"tools": [{}], "messages": messages}
    half = {"role": "user", "content": [block("a")]}
    assert cut(body, Place("messages", 1, 1)) == {"messages": [system, half]}
    assert cut(body, Place("messages", 1)) == {"messages": messages[:2]}
    assert cut(body, Place("tools", 0)) == {"messages": [system]}
    anthropic = {"system": [block("a"), block("b")], "messages": messages[1:], "tools": [{}]}
    assert cut(anthropic, Place("system", 0)) == {"system": [block("a")], "messages": []}
    assert cut(anthropic, Place("tools", 0)) == {"messages": []}
    assert body["messages"][1]["content"] == [block("a"), block("b")]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cache_control": {"type": "persistent"}}, "an unknown marker"),
        ({"cache_control": "ephemeral"}, "an unknown marker"),
        ({"cache_control": {**EPHEMERAL, "ttl": "2h"}}, "an unknown time of a marker"),
        ({"cache_control": {**EPHEMERAL, "ttl": "30m"}}, "an unknown time of a marker"),
        ({"cache_control": {**EPHEMERAL, "ttl": {}}}, None),
        ({"cache_control": {**EPHEMERAL, "ttl": ["5m"]}}, "an unknown time of a marker"),
        ({"prompt_cache_breakpoint": {"mode": "best"}}, "an unknown marker"),
        ({"prompt_cache_options": {"ttl": "5m"}}, "an unknown time of a marker"),
        ({"prompt_cache_retention": "for ever"}, "an unknown time of a marker"),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_options": {"mode": "explicit"}}, None),
    ],
)
def test_unknown_markers_are_named_and_others_count(fields, why):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    markers = read_markers(body)
    assert markers.ignored == ([] if why is None else [why])
    known = {**body, "system": [block("s", cache_control=EPHEMERAL)]}
    assert Marker(FIVE, Place("system", 0)) in read_markers(known).found or fields == {
        "cache_control": {**EPHEMERAL, "ttl": {}}
    }


def test_a_prefix_with_media_is_not_rendered_for_a_marker():
    picture = {"type": "image_url", "image_url": {"url": "http://somewhere"}}
    marked = block("a", cache_control=EPHEMERAL)
    body = {"messages": [{"role": "user", "content": [picture, marked, block("b")]}]}
    markers = read_markers(body)
    assert (markers.found, markers.ignored) == ([], ["a marker after media"])
    body["messages"][0]["content"] = [marked, picture]
    assert read_markers(body).found == [Marker(FIVE, Place("messages", 0, 1))]
    body["messages"][0]["content"] = [picture, marked]
    assert read_markers(body).found == [Marker(FIVE)]
    result = {"type": "tool_result", "content": [picture], "cache_control": EPHEMERAL}
    body["messages"][0]["content"] = [result, block("b")]
    assert read_markers(body).ignored == ["a marker after media"]


@pytest.mark.parametrize(
    ("last", "carries"),
    [
        ({"role": "tool", "content": "x"}, True),
        ({"role": "user", "content": [{"type": "tool_result"}]}, True),
        ({"type": "function_call_output", "output": "x"}, True),
        ({"type": "function_call"}, False),
        ({"role": "user", "content": "tool_result"}, False),
        ("tool", False),
    ],
)
def test_the_last_message_says_whether_a_tool_has_returned(last, carries):
    assert carries_tool_results({"messages": [{"role": "user"}, last]}) is carries
    assert not carries_tool_results({"messages": [last, {"role": "user", "content": "x"}]})
    assert not carries_tool_results({"messages": []})
