"""Hints of a vLLM request: its priority, its envelope `kv_hints`, and kvtrie's parameters."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.engines.vllm_engine import SIZE, Engine, PlayedRequest

from kvtrie import Scope
from kvtrie.engines.server.request_hints import FAR, RetainedRange
from kvtrie.engines.vllm.hints import envelope_hints, envelope_ranges, priority_hint, range_hints
from kvtrie.settings.hint import Prefetch, Release, Retain

TOKENS = np.arange(64, dtype=np.uint32)


def action(kind, payload, version="1.0"):
    return SimpleNamespace(action_id="a", action_type=kind, action_version=version, payload=payload)


def advice(*actions, session="chat"):
    envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))
    return envelope_hints(envelope, TOKENS, Scope(), session, now=7)


def test_actions_of_an_envelope_become_hints():
    ranges = [
        {"start": 0, "end": 32, "priority": 80, "duration": 60.0},
        {"start": 32, "end": None, "priority": 40},
        {"covers_output": True, "priority": 70, "duration": 5},
    ]
    advised = advice(
        action("kv.retain", {"directives": ranges}),
        action("kv.retain", {"scope": "agent", "directives": ranges[:1]}, "1.7"),
        action("kv.prefetch", {}),
        action("kv.prefetch", {"session_id": "next"}),
        action("kv.release", {"session_id": "old"}),
        action("kv.progress", {"eta": 2.5}),
        action("kv.progress", {"eta": 0, "session_id": "next"}),
    )
    assert advised.ignored == []
    assert not advised.end
    first, second, answers, owned, ahead, other, old, *tools = advised.hints
    times = [(tool.session, tool.eta, tool.tier) for tool in tools]
    assert times == [("chat", 2_500_000_000, "host"), ("next", 0, "host")]
    assert isinstance(first, Retain)
    assert (first.start, first.end, first.priority, first.owner) == (0, 32, 80, "chat")
    assert first.ttl == 60_000_000_000
    assert (second.start, second.end, second.ttl) == (32, None, None)
    assert (answers.session, answers.decode_priority, answers.end) == ("chat", 70, 0)
    assert answers.decode_ttl == 5_000_000_000
    assert owned.owner == "agent"
    assert isinstance(ahead, Prefetch)
    assert (ahead.tier, list(ahead.tokens)) == ("host", TOKENS.tolist())
    assert (other.session, other.tokens) == ("next", None)
    assert isinstance(old, Release)
    assert old.session == "old"
    assert advice(action("kv.deref", {})).end
    assert advice(action("kv.release", {"session_id": "chat"})).end


def test_the_deadline_of_a_prefetch_counts_from_now():
    [at_once, late] = advice(
        action("kv.prefetch", {"session_id": "next"}), action("kv.prefetch", {"deadline": 1.5})
    ).hints
    assert (at_once.deadline, late.deadline) == (None, 1_500_000_007)


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        ("kv.fetch", {}, "no such action"),
        ("kv.retain", {"ranges": []}, "it has no 'ranges'"),
        ("kv.retain", [], "an object wanted"),
        ("kv.retain", {"directives": [{"start": 0}]}, "without a priority"),
        ("kv.retain", {"directives": [{"priority": 101}]}, "101"),
        ("kv.retain", {"directives": [{"priority": True}]}, "True"),
        ("kv.retain", {"directives": [{"priority": 3, "duration": float("nan")}]}, "nan"),
        ("kv.retain", {"directives": [{"priority": 3, "duration": 10**400}]}, "duration"),
        ("kv.retain", {"directives": [{"priority": 3, "bogus": 1}]}, "it has no 'bogus'"),
        ("kv.retain", {"directives": [{"covers_output": True, "priority": 3, "end": 4}]}, "range"),
        ("kv.retain", {"directives": ["all"]}, "an object wanted"),
        ("kv.prefetch", {"session_id": 3}, "session"),
        ("kv.prefetch", {"deadline": -1}, "deadline is -1"),
        ("kv.release", {"deadline": 1}, "it has no 'deadline'"),
        ("kv.progress", {}, "eta is None"),
        ("kv.progress", {"eta": -1}, "eta is -1"),
    ],
)
def test_what_makes_no_sense_is_named_and_the_rest_counts(kind, payload, message):
    good = action("kv.retain", {"directives": [{"priority": 50}]})
    advised = advice(action(kind, payload), good)
    assert len(advised.ignored) == 1
    assert message in advised.ignored[0]
    assert [hint.priority for hint in advised.hints] == [50]


def test_other_versions_too_many_actions_and_a_release_of_nobody_are_refused():
    assert "version 1" in advice(action("kv.prefetch", {}, "2.0")).ignored[0]
    many = advice(*[action("kv.prefetch", {})] * 70)
    assert (len(many.hints), len(many.ignored)) == (64, 1)
    assert "session" in advice(action("kv.release", {}), session=None).ignored[0]


def test_with_opaque_keys_only_ranges_and_a_release_of_the_own_session_are_served():
    rows = [{"start": 3, "end": 9, "priority": 80, "duration": 2.5}, {"priority": 7}]
    actions = [
        action("kv.retain", {"directives": rows, "scope": "agent"}),
        action("kv.release", {}),
        action("kv.prefetch", {}),
        action("kv.deref", {"session_id": "another"}),
        action("kv.retain", {"directives": [{"covers_output": True, "priority": 9}]}),
        action("kv.retain", {"directives": [{"priority": 101}]}),
    ]
    ranges, ignored = envelope_ranges(SimpleNamespace(actions=actions))
    assert ranges == [
        RetainedRange(0, FAR, 0, None),
        RetainedRange(3, 9, 80, 2_500_000_000),
        RetainedRange(0, FAR, 7, None),
    ]
    assert [why.partition(":")[0] for why in ignored] == [
        "'kv.retain'",
        "Prefetch",
        "Release",
        "Retain",
    ]
    assert envelope_ranges(SimpleNamespace(actions=[])) == ([], [])


def test_a_lower_priority_of_vllm_keeps_longer():
    ranges = [priority_hint(rank, TOKENS, None, None).priority for rank in (-1000, -5, 1, 1000)]
    assert ranges == [100, 40, 34, 0]


def stays(engine, request, tokens):
    """How much of a prompt host memory has after others have filled it."""
    prompt = PlayedRequest(request, tokens, len(tokens), 1)
    engine.waiting.append(prompt)
    return prompt


def test_envelope_and_priority_decide_what_stays_on_host():
    def left(**more):
        engine = Engine("", 1, 0, 1, host=6)
        for at in range(5):
            tokens = [at] * 12
            request = stays(engine, str(at), tokens)
            for name, value in (more if at == 0 else {}).items():
                setattr(request, name, value)
            engine.drain()
        found = engine.scheduler.match(PlayedRequest("again", [0] * 13, 13, 1), 0)
        engine.scheduler.manager.audit()
        engine.close()
        return found, engine.scheduler.cache.counters.lost["a hint that says nothing sensible"]

    retain = action("kv.retain", {"directives": [{"priority": 90}]})
    envelope = SimpleNamespace(actions=[retain])
    assert left() == (0, 0)
    assert left(kv_hints=envelope) == (3 * SIZE, 0)
    assert left(priority=-50) == (3 * SIZE, 0)
    assert left(kv_hints=SimpleNamespace(actions=[action("kv.fetch", {})])) == (0, 1)


def test_a_release_ends_the_session_when_its_request_ends():
    engine = Engine("", 1, 0, 1)
    request = stays(engine, "1", [1] * 12)
    request.session_id = "chat"
    request.kv_hints = SimpleNamespace(actions=[action("kv.release", {})])
    engine.step()
    assert len(engine.scheduler.manager.sessions()) == 1
    engine.drain()
    assert len(engine.scheduler.manager.sessions()) == 0
    engine.close()


def test_ranges_to_retain_become_hints():
    tokens = np.arange(64, dtype=np.uint32)
    (hint,) = range_hints([RetainedRange(0, 32, 80, 60_000_000_000)], tokens, Scope(), "chat")
    assert (hint.priority, hint.end, hint.ttl, hint.owner) == (80, 32, 60_000_000_000, "chat")
