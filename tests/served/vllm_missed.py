"""Causes of computed tokens in vLLM's real scheduler, up to the answer of a request."""

from __future__ import annotations

import random

import pytest
import servers  # noqa: F401 - its settings first
from modelfree import WORDS, Engine, write_model

ASKED = {"kvtrie": {"why": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model's configuration, all that a scheduler reads of it."""
    return write_model(tmp_path_factory.mktemp("model"))


def make_engine(model, blocks=80, **more):
    extra = {"tiers": [{"kind": "host", "blocks": 200}], "why_min_tokens": 16}
    extra = {**extra, "why_clients": True, **more}
    engine = Engine(model, extra, blocks=blocks)
    engine.params, engine.computed = {}, {}
    on_output = engine.on_output

    def seen(output):
        if output.prefill_stats is not None:
            engine.computed[output.request_id] = output.prefill_stats.num_computed_tokens
        if output.finish_reason is not None:
            engine.params[output.request_id] = output.kv_transfer_params
        on_output(output)

    engine.on_output = seen
    return engine


def ask(engine, name, prompt, **more):
    """One request to its end; its explanation, as vLLM passes it on."""
    engine.add(name, prompt, 1, **more)
    request = engine.prompts[name][2]
    request.kv_transfer_params = ASKED
    engine.drain()
    engine.kv_scheduler.why.drain()
    return engine.kv_scheduler.why.answer(name)


def words(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(WORDS) for _ in range(count)]


def test_each_break_has_its_cause_and_its_exact_token(model):
    engine = make_engine(model)
    system, tools, talk = words(1, 96), words(2, 96), words(3, 160)
    old = [*system, *tools, *talk]
    ask(engine, "old", old)
    date = [*system[:40], (system[40] + 1) % WORDS, *system[41:], *tools, *talk]
    reordered = [*system, *tools[48:], *tools[:48], *talk]
    inserted = [*system, *tools[:50], 7, 8, 9, *tools[50:], *talk]
    truncated = [*system, *tools, *talk[60:]]
    quoted = [*system, *words(9, 300), *talk[:32]]
    table = {
        "date": (date, "diverged"),
        "reordered": (reordered, "diverged"),
        "inserted": (inserted, "diverged"),
        "truncated": (truncated, "diverged"),
        "quoted": (quoted, "new"),
        "new conversation": ([*system, *words(10, 250)], "new"),
    }
    for name, (prompt, cause) in table.items():
        answer = ask(engine, name, prompt)
        pairs = zip(old, prompt, strict=False)
        first = next(at for at, (one, other) in enumerate(pairs) if one != other)
        assert (name, answer["diverged_at"]) == (name, first)
        causes = {why for *_, why in answer["causes"]} - {"not cacheable"}
        assert (name, causes) == (name, {cause})
        assert answer["asked"][0] == prompt[first]
    salted = ask(engine, "salted", old, cache_salt="x")
    assert {why for *_, why in salted["causes"]} == {"new"}
    assert salted["detail"] == "first request of this salt"
    engine.close()


def test_the_answer_of_a_request_has_its_explanation(model):
    engine = make_engine(model)
    ask(engine, "one", words(1, 100))
    ask(engine, "again", [*words(1, 90), *words(2, 10)])
    causes = [[80, 96, "not found"], [96, 100, "not cacheable"]]
    numbers = {"tokens": 100, "found": 80, "computed": 20}
    assert engine.params["again"]["kvtrie"]["why"] == {
        "state": "explained",
        "causes": causes,
        **numbers,
    }
    engine.add("two", words(1, 100), 1)
    engine.drain()
    assert engine.params["two"] is None
    engine.close()


def test_a_server_answers_no_client_by_default(model):
    engine = make_engine(model, why_clients=False)
    ask(engine, "one", words(1, 100))
    assert engine.params["one"] == {"kvtrie": {"why": {"state": "off", "causes": []}}}
    engine.close()


@pytest.mark.parametrize("seed", range(2))
def test_the_causes_sum_to_the_tokens_that_vllm_computes(model, seed):
    engine, draw = make_engine(model, blocks=50), random.Random(seed)
    heads = [words(at, 64) for at in range(3)]
    for at in range(40):
        tail = words(100 + draw.randrange(30), draw.randint(1, 120))
        prompt = draw.choice(heads)[: draw.randint(16, 64)] + tail
        engine.add(str(at), prompt, draw.randint(1, 6))
        for _ in range(draw.randint(1, 3)):
            engine.step()
    engine.drain()
    engine.kv_scheduler.why.drain()
    assert len(engine.computed) == 40
    assert sum(engine.kv_scheduler.why.tokens.values()) == sum(engine.computed.values())
    assert engine.right == 40
    engine.close()
