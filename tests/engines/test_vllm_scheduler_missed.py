"""Computed prompt tokens of a vLLM server by cause."""

import json

import pytest
from tests.engines.vllm_engine import SIZE, Engine, PlayedRequest, make_engine, play

from kvtrie.engines.vllm.metrics import MetricsExporter


def computed_of(engine):
    """Record the prompt tokens that each request computes, at its first admission."""
    computed, admit = {}, engine.scheduler.admit

    def admitted(request, table, loaded):
        computed.setdefault(request.request_id, request.num_prompt_tokens - loaded)
        admit(request, table, loaded)

    engine.scheduler.admit = admitted
    return computed


@pytest.mark.parametrize(("seed", "deep"), [(0, False), (1, True)])
def test_the_causes_sum_to_the_computed_prompt_tokens(tmp_path, seed, deep):
    engine = Engine(tmp_path if deep else "", 1, seed, seed, why_min_tokens=4)
    computed = computed_of(engine)
    play(engine, 40, seed)
    why = engine.scheduler.why
    why.drain()
    assert sum(why.tokens.values()) == sum(computed.values())
    assert {"new", "not cacheable"} <= set(why.tokens)
    assert deep or "evicted" in why.tokens  # a disk holds all blocks, as far as copies are in time
    assert all(count > 0 for count in why.tokens.values())
    exported = MetricsExporter().take(engine.scheduler.manager.stats(), *own(engine))
    assert json.loads(json.dumps(exported)) == exported
    rows = exported["counters"]["vllm:kvtrie_missed_tokens_total"]
    assert sum(rows.values()) == sum(computed.values())
    engine.close()
    engine.scheduler.close()


def own(engine):
    return engine.scheduler.cache.counters, 0, 0, engine.scheduler.why


def run(engine, name, tokens, **more):
    """One request from its arrival to its end; the answer of its end."""
    answers, end = [], engine.scheduler.end
    engine.scheduler.end = lambda request: answers.append(end(request))
    engine.add(name, tokens, 1)
    for field, value in more.items():
        setattr(engine.seen[-1], field, value)
    engine.drain()
    engine.scheduler.end = end
    return answers[-1]


ASKED = {"kvtrie": {"why": True}}


def explained(tokens, found, causes):
    """The answer to a client."""
    numbers = {"tokens": tokens, "found": found, "computed": tokens - found}
    return {"state": "explained", "causes": causes, **numbers}


def test_no_client_is_answered_unless_a_setting_says_so():
    engine = make_engine()
    assert run(engine, "one", [*range(100, 124)]) is None
    asked = run(engine, "two", [*range(100, 112), *range(12)], kv_transfer_params=ASKED)
    assert asked == {"state": "off", "causes": []}
    assert engine.scheduler.why.answer("two")["branches"] == []  # nor is its prompt compared
    engine.close()


def test_an_answer_follows_from_its_prompt_and_what_was_found_whatever_others_have():
    engine = make_engine(why_clients=True)
    secret = [*range(100, 124)]
    run(engine, "theirs", secret)
    run(engine, "salted", [*range(200, 224)], cache_salt="theirs")
    for name, prompt, salt, found in (
        ("parts in a block", [*secret[:6], 99, *secret[6:]], "", 4),
        ("ends in their block", secret[:10], "", 8),
        ("has all of theirs", secret, "", 20),
        ("other scope", [*range(200, 224)], "mine", 0),
        ("new", [*range(30, 54)], "mine", 0),
    ):
        more = {"cache_salt": salt} if salt else {}
        answer = run(engine, name, prompt, kv_transfer_params=ASKED, **more)
        whole = (len(prompt) - 1) // SIZE * SIZE
        causes = [[found, whole, "not found"]] * (found < whole)
        causes.append([whole, len(prompt), "not cacheable"])
        assert (name, answer) == (name, explained(len(prompt), found, causes))
    engine.close()


def test_an_evicted_prompt_of_another_user_is_answered_as_a_new_one():
    engine = make_engine(host=6, why_clients=True)
    run(engine, "theirs", [*range(100, 124)])
    for at in range(4):
        run(engine, str(at), [at] * 32)
    asked = {"kv_transfer_params": ASKED, "cache_salt": "mine"}
    gone, new = (
        run(engine, name, prompt, **asked)
        for name, prompt in (("gone", [*range(100, 124)]), ("new", [*range(30, 54)]))
    )
    assert gone == new == explained(24, 0, [[0, 20, "not found"], [20, 24, "not cacheable"]])
    engine.scheduler.why.drain()
    assert engine.scheduler.why.tokens["evicted"] == 0  # another tenant is another scope
    again = run(engine, "mine again", [*range(100, 124)], kv_transfer_params=ASKED)
    assert again["causes"] == [[0, 20, "not found"], [20, 24, "not cacheable"]]
    engine.scheduler.why.drain()
    assert engine.scheduler.why.tokens["evicted"] > 0  # which the operator sees
    engine.close()


def test_the_operator_sees_the_whole_miss_of_a_request_that_asks():
    engine = make_engine(why_clients=True)
    old = [*range(100, 124)]
    broken = [*old[:6], 99, *old[6:]]
    run(engine, "old", old)
    run(engine, "first", broken, kv_transfer_params=ASKED)  # its thread may not have ended
    engine.scheduler.why.drain()
    answer = engine.scheduler.why.answer("first")
    assert answer["diverged_at"] == 6
    assert answer["asked"] == broken[6:]
    assert answer["branches"][0]["tokens"] == old[6:]
    assert answer["causes"] == [[4, 24, "diverged"], [24, 25, "not cacheable"]]
    run(engine, "salted", old, cache_salt="s", kv_transfer_params=ASKED)
    engine.scheduler.why.drain()
    assert engine.scheduler.why.answer("salted")["diverged_at"] is None
    engine.close()
    engine.scheduler.close()


def test_requests_that_read_no_cache_are_not_cacheable():
    engine = make_engine(why_clients=True)
    for at, more in enumerate(({"prompt_embeds": object()}, {"skip_reading_prefix_cache": True})):
        request = PlayedRequest(str(at), list(range(13)), 13, 1)
        request.kv_transfer_params = ASKED
        for field, value in more.items():
            setattr(request, field, value)
        engine.scheduler.match(request, 0)
        engine.scheduler.admit(request, [[1, 2, 3, 4]], 0)
        answer = engine.scheduler.end(request)
        assert answer == explained(13, 0, [[0, 13, "not cacheable"]])
    assert engine.scheduler.why.tokens == {"not cacheable": 26}
    engine.close()


def test_a_session_counts_only_its_further_input():
    engine = make_engine()
    request = PlayedRequest("chat", list(range(13)), 13, 1)
    engine.scheduler.match(request, 0)
    engine.scheduler.admit(request, [[1, 2, 3, 4]], 0)
    why = engine.scheduler.why
    assert sum(why.tokens.values()) == 13
    request.all_token_ids += range(50, 60)
    request.num_prompt_tokens, request.computed = 23, 3 * SIZE
    engine.scheduler.admit(request, [[1, 2, 3, 4, 5, 6]], 0)
    assert sum(why.tokens.values()) == 23
    engine.scheduler.end(request)
    engine.close()


def test_without_why_nothing_is_counted_or_exported():
    engine = Engine("", 1, 0, 0, 16, why=False)
    run(engine, "old", list(range(24)), kv_transfer_params=ASKED)
    assert engine.scheduler.why is None
    exported = engine.scheduler.counts(MetricsExporter())
    assert "vllm:kvtrie_missed_tokens_total" not in exported["counters"]
    engine.close()


def test_the_minutes_line_names_the_first_breaker(caplog):
    engine, now = make_engine(why_clients=True), [60 * 10**9]
    engine.scheduler.cache.clock = lambda: now[0]
    caplog.set_level("INFO", "vllm.kvtrie")
    old = [*range(100, 124)]
    run(engine, "old", old)
    run(engine, "broken", [*old[:6], 99, *old[6:]], kv_transfer_params=ASKED)
    engine.scheduler.why.drain()
    now[0] += 60 * 10**9
    run(engine, "last", [1, 2, 3])
    (line,) = [line for line in caplog.messages if line.startswith("kvtrie: tokens asked")]
    assert "top breaker: 18 recurring tokens computed after token 6 by 1 requests" in line
    assert "100" not in line.partition("top breaker")[2]
    engine.close()
    engine.scheduler.close()


def test_neither_statistics_nor_logs_have_a_text_of_a_client(caplog):
    evil = "\x1b[2J\nforged"
    hints = {"session": evil, evil: 1, "end": evil, "retain": [{evil: 2}, evil], "why": True}
    engine, exporter = make_engine(why_clients=True), MetricsExporter()
    answer = run(engine, evil, [*range(24)], kv_transfer_params={"kvtrie": hints}, cache_salt=evil)
    run(engine, "refused", [*range(24)], cache_salt="\ud800" + evil)
    assert caplog.records
    assert all(message.isprintable() for message in caplog.messages)
    scheduler = engine.scheduler
    seen = answer, scheduler.cache.counters.as_dict(), scheduler.counts(exporter)
    assert "forged" not in repr(seen)
    engine.close()
