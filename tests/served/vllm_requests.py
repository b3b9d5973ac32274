"""Requests of any content, and resets while copies are under way, in vLLM's real scheduler."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import servers  # noqa: F401 - its settings first
from modelfree import SIZE, WORDS, Engine, write_model
from vllm import SamplingParams
from vllm.v1.request import Request

KEYS = ["kvtrie", "session", "end", "retain", "start", "priority", "ttl_s", "x", "directives"]
ODD = [None, True, 0, -1, 2**63, 10**400, 1e300, math.nan, math.inf, "", "a\0b", "\ud800", "s"]
LONG = "x" * 70_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model's configuration, all that a scheduler reads of it."""
    return write_model(tmp_path_factory.mktemp("model"))


def value(draw, depth=3):
    """Any JSON value."""
    kind = draw.random()
    if depth and kind < 0.3:
        return [value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if depth and kind < 0.6:
        return {draw.choice(KEYS): value(draw, depth - 1) for _ in range(draw.randint(0, 3))}
    return draw.choice([*ODD, LONG, draw.randrange(100), draw.random()])


def section(draw):
    """The parameters of a request: mostly of the right form, with any values in it."""
    names = ("start", "end", "priority", "ttl_s")
    rows = [
        {name: value(draw, 1) for name in names if draw.random() < 0.4}
        for _ in range(draw.randint(0, 3))
    ]
    hints = {
        "retain": rows if draw.random() < 0.7 else value(draw),
        "session": draw.choice(["s", "t", value(draw, 1)]),
        "end": draw.choice([True, False, value(draw, 1)]),
    }
    hints = {name: one for name, one in hints.items() if draw.random() < 0.6}
    return {"kvtrie": hints if draw.random() < 0.8 else value(draw)}


def envelope(draw):
    """An envelope of actions."""
    kinds = ["kv.retain", "kv.release", "kv.deref", "kv.prefetch", value(draw, 0)]
    actions = [
        SimpleNamespace(
            action_type=draw.choice(kinds),
            action_version=draw.choice(["1", "1.0", value(draw, 0)]),
            payload=value(draw),
        )
        for _ in range(draw.randint(0, 3))
    ]
    return SimpleNamespace(actions=draw.choice([actions, actions, value(draw, 1)]))


def add(engine, draw, name, prompt):
    """A request of odd content, except for what vLLM itself reads before the connector."""
    params = section(draw)
    sampling = SamplingParams(
        max_tokens=draw.randint(1, 3),
        temperature=0,
        detokenize=False,
        ignore_eos=True,
    )
    sampling.update_from_generation_config({}, None)
    request = Request(
        name,
        list(prompt),
        sampling,
        None,
        block_hasher=engine.hasher,
        cache_salt=draw.choice([None, "salt", LONG]),
        priority=draw.choice([0, -5, 2**40, -(2**40)]),
    )
    # As an HTTP server or a Python client would give them, past vLLM's own types.
    request.kv_hints = envelope(draw) if draw.random() < 0.5 else None
    request.session_id = draw.choice([None, "s", value(draw, 1)])
    request.kv_transfer_params = params
    if draw.random() < 0.1:
        place = SimpleNamespace(offset=draw.choice([0, 3, -1, 2**70]), length=1)
        name = draw.choice(["image", "", "\ud800", LONG])
        feature = SimpleNamespace(identifier=name, mm_position=place, data=None)
        engine.scheduler.connector.scheduler.requests.of(odd := FeaturesOnly(request, [feature]))
        engine.scheduler.connector.scheduler.end(odd)
    engine.prompts[request.request_id] = (list(prompt), sampling.max_tokens, request)
    engine.scheduler.add_request(request)


class FeaturesOnly:
    """A request as the connector sees it, with inputs that the tiny model has no encoder for."""

    def __init__(self, request, features):
        self._request, self.mm_features = request, features
        self.request_id = f"{request.request_id} with an image"

    def __getattr__(self, name):
        return getattr(self._request, name)


@pytest.mark.parametrize(
    ("seed", "cases"), [(0, 150), pytest.param(1, 10_000, marks=pytest.mark.deep)]
)
def test_no_content_of_a_request_ends_the_engine(model, seed, cases):
    draw = random.Random(seed)
    engine = Engine(model, {"tiers": [{"kind": "host", "blocks": 30}]}, blocks=48, seed=seed)
    heads = [[draw.randrange(WORDS) for _ in range(2 * SIZE)] for _ in range(3)]
    for at in range(cases):
        add(engine, draw, str(at), [*draw.choice(heads), draw.randrange(WORDS)])
        if at % 8 == 0:
            engine.add(f"plain {at}", [*draw.choice(heads), at % WORDS], 2)
        for _ in range(draw.randint(1, 3)):
            engine.step()
        if at % 64 == 0:
            engine.kv_scheduler.manager.audit()
    engine.drain()
    assert engine.kv_scheduler.cache.counters.lost["a hint that says nothing sensible"] > cases / 10
    assert engine.kv_scheduler.cache.counters.lost["a scope that cannot be formed"] > cases / 20
    assert engine.kv_scheduler.cache.counters.lost["an unexpected error"] == 0
    assert not engine.wrong
    assert engine.right == cases + -(-cases // 8)
    engine.close()


@pytest.mark.parametrize("seed", range(2))
def test_resets_with_copies_under_way_succeed(model, tmp_path, seed):
    draw = random.Random(seed)
    rows = [
        {"kind": "host", "blocks": 12},
        {"kind": "disk", "blocks": 200, "path": str(tmp_path)},
    ]
    engine = Engine(model, {"tiers": rows}, blocks=24, seed=seed)
    head = [draw.randrange(WORDS) for _ in range(3 * SIZE)]
    busy = 0
    for at in range(40):
        engine.add(str(at), [*head, *(draw.randrange(WORDS) for _ in range(9))], 3)
        for _ in range(draw.randint(1, 5)):
            engine.step()
        if draw.random() < 0.3:
            while engine.under_way:
                engine.step()
            stats = engine.kv_scheduler.manager.stats()
            busy += stats.leases + stats.moves > 0
            assert engine.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
            engine.kv_scheduler.manager.audit()
    engine.close()
    assert busy > 0
    assert not engine.wrong
    assert engine.right == 40
