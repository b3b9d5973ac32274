"""Bad calls at random states: each raises an error of kvtrie that names what is wrong, and changes
nothing.
"""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie import (
    BlockManager,
    ClosedError,
    ConfigError,
    Index,
    KvtrieError,
    ModelShape,
    Moves,
    NoSpaceError,
    Scope,
    Tier,
)
from kvtrie.demo.report import read_report
from kvtrie.sim.trace import read_trace

LAYERS = 3
MODEL = ModelShape(layers=LAYERS, kv_heads=1, head_dim=4, fingerprint="any")


def make(kind):
    gpu, host = Tier("gpu", blocks=5), Tier("host", blocks=4)
    if kind == "layers":
        gpu, host = Tier("gpu", blocks=5, layer_slots=True), Tier("host", blocks=4)
    if kind == "through":
        gpu = Tier("gpu", blocks=5, write="through", free_low=0.3)
    if kind == "engine":
        gpu = Tier("gpu", blocks=5, owner="engine")
    tiers = [gpu] if kind == "one" else [gpu, host]
    return BlockManager(
        MODEL,
        tiers,
        block_tokens=4,
        structure="holes" if kind in ("layers", "holes") else "leaf-only",
        ranks=2 if kind == "ranks" else 1,
    )


class World:
    """A manager that has been used for a while, and what its user knows of it."""

    def __init__(self, kind, script):
        self.manager = make(kind)
        self.now = 0
        self.released = []
        self.held = []
        self.taken = []
        self.done = []
        for step, at, size in script:
            self.now += 1
            # A step that cannot be taken here is left out; tests of the API say which can.
            with suppress(ConfigError, NoSpaceError, ClosedError):
                getattr(self, step)(at, size)
        # Time passes in a refused call too: what is ready by now arrives before it.
        self.manager.mark([], -1 % self.tiers, present=False, now=self.now)

    def lease(self, at):
        return self.held[at % len(self.held)] if self.held else None

    def acquire(self, at, size):
        prompt = np.arange(size) + 1000 * (at % 3)
        lease = self.manager.acquire(prompt, now=self.now, reserve=at % 6, session=f"s{at % 2}")
        self.held.append(lease)

    def commit(self, at, size):
        if lease := self.lease(at):
            tokens = np.arange(lease.tokens, lease.tokens + size % 7) + 1000 * (lease.id % 3)
            lease.commit(tokens, now=self.now)

    def release(self, at, _):
        if self.held:
            lease = self.held.pop(at % len(self.held))
            lease.release(now=self.now)
            self.released.append(lease)

    def suspend(self, at, size):
        if lease := self.lease(at):
            if lease.state == "active":
                lease.suspend(now=self.now)
            else:
                lease.resume(size % 4, now=self.now)

    def fork(self, at, _):
        if lease := self.lease(at):
            self.held += lease.fork(1, now=self.now)

    def take(self, at, size):
        self.taken += self.manager.moves(at + size).id.tolist()

    def complete(self, at, _):
        if self.taken:
            move, ok = self.taken.pop(0), at % 4 != 0
            if self.manager.complete(move, now=self.now, ok=ok):
                self.done.append(move)

    def mark(self, at, size):
        prompt = np.arange(size) + 1000 * (at % 3)
        ready = self.now + at
        self.manager.mark(prompt, -1 % self.tiers, present=True, now=self.now, ready=ready)

    @property
    def tiers(self):
        return len(self.manager.tiers)

    @property
    def owner(self):
        return self.manager.tiers[0].owner


STEPS = ["acquire", "acquire", "commit", "release", "suspend", "fork", "take", "complete", "mark"]


def script(seed, length):
    """Steps that hold and move much; drawn one by one they would mostly do nothing."""
    rng = random.Random(seed)
    return [(rng.choice(STEPS), rng.randrange(20), rng.randrange(1, 20)) for _ in range(length)]


worlds = st.builds(
    World,
    st.sampled_from(["one", "two", "holes", "layers", "through", "engine", "ranks"]),
    st.builds(script, st.integers(0, 2**32), st.integers(0, 60)),
)

negative = st.integers(max_value=-1)
beyond_token = st.integers(min_value=2**32)
out_of_range = negative | beyond_token
NO_TOKENS = [
    np.ones(3),
    np.ones(3, dtype=bool),
    np.ones((2, 2), dtype=np.int64),
    np.array(5),
    np.array(["a"]),
    np.array([1, 2], dtype=object),
    np.array([1], dtype=">u4"),
    memoryview(bytes(8)).cast("f"),
    memoryview(bytes(16)).cast("I", [2, 2]),
    [1, 2.5],
    [1, None],
    ["1"],
    [[1]],
]
bad_tokens = st.one_of(
    st.lists(st.integers(0, 9), max_size=5).flatmap(
        lambda good: st.tuples(st.just(good), out_of_range).map(lambda pair: [*pair[0], pair[1]])
    ),
    st.integers(-(2**31), -1).map(lambda token: np.array([1, token], dtype=np.int32)),
    st.integers(-(2**63), -1).map(lambda token: np.array([token], dtype=np.int64)),
    st.integers(2**32, 2**64 - 1).map(lambda token: np.array([3, token], dtype=np.uint64)),
    st.integers(0, len(NO_TOKENS) - 1).map(NO_TOKENS.__getitem__),
)
bad_now = negative | st.integers(min_value=2**63)
bad_tier = out_of_range | st.integers(2, 300) | st.sampled_from(["tape", ""])
garbage = st.binary(max_size=60)
bad_slots = st.lists(negative | st.integers(min_value=2**32 - 1), min_size=1, max_size=3)
bad_layer = negative | st.integers(min_value=LAYERS)
half = negative | st.integers(min_value=2**16)
unknown = st.integers(min_value=10**6)
too_much = st.integers(10**3, 2**44)
bad_count = negative | st.integers(min_value=2**44 + 1)


def other_structure(manager):
    holes = b"holes" in manager.snapshot().split(b"\n", 1)[0]
    return Scope(structure="leaf-only" if holes else "holes")


def calls(world, draw):
    """Every bad call that makes sense in a world, by name."""
    m, now = world.manager, world.now
    tokens = [1, 2, 3, 4]
    found = {
        "lookup tokens": lambda: m.lookup(draw(bad_tokens), now=now),
        "lookup now": lambda: m.lookup(tokens, now=draw(bad_now)),
        "lookup keep": lambda: m.lookup(tokens, now=now, keep=draw(bad_count)),
        "lookup_many": lambda: m.lookup_many([tokens, draw(bad_tokens)], now=now),
        "acquire tokens": lambda: m.acquire(draw(bad_tokens), now=now),
        "acquire now": lambda: m.acquire(tokens, now=draw(bad_now)),
        "acquire deadline": lambda: m.acquire(tokens, now=now, deadline=draw(bad_now)),
        "acquire load": lambda: m.acquire(tokens, now=now, load="some"),
        "acquire reserve": lambda: m.acquire(tokens, now=now, reserve=draw(negative)),
        "lease": lambda: m.lease(draw(unknown)),
        "moves": lambda: m.moves(draw(negative)),
        "complete unknown": lambda: m.complete(draw(unknown), now=now),
        "complete none": lambda: m.complete([0], now=now),
        "complete id": lambda: m.complete([draw(negative)], now=now),
        "complete rank": lambda: m.complete([], now=now, rank=draw(negative)),
        "complete hung": lambda: m.complete([], now=now, hung=True),
        "predict": lambda: m.predict([draw(negative)], now=now),
        "transmit lane": lambda: m.transmit("none", 1, now=now),
        "transmit tokens": lambda: m.transmit("gpu read", draw(negative), now=now),
        "transmit layers": lambda: m.transmit(
            "gpu read",
            1,
            now=now,
            layers=draw(st.just(0) | bad_layer.filter(lambda n: n != LAYERS)),
        ),
        "mark tokens": lambda: m.mark(draw(bad_tokens), 0, present=True, now=now),
        "mark tier": lambda: m.mark(tokens, draw(bad_tier), present=True, now=now),
        "mark times": lambda: m.mark(tokens, 0, present=True, now=now, ready=5, first=6),
        "commit_many lease": lambda: m.commit_many([draw(unknown)], [1], now=now),
        "commit_many length": lambda: m.commit_many([], [1, 2], now=now),
        "index label": lambda: m.load_index(Index([(draw(garbage), 0, 0, 1)]), now=now),
        "index tier": lambda: m.index(draw(bad_tier), now=now),
        "load_index tier": lambda: m.load_index(Index(), draw(bad_tier), now=now),
        "explain block": lambda: m.explain(draw(unknown), now=now),
        "explain tier": lambda: m.explain(0, now=now, tier=draw(bad_tier)),
        "cost layer": lambda: m.cost(draw(bad_layer), 0, 1, 0),
        "cost block": lambda: m.cost(0, 4, 4, 0),
        "cost context": lambda: m.cost(0, 0, 1, draw(bad_now)),
        "layer_tiers": lambda: m.layer_tiers(draw(unknown)),
        "from_bytes": lambda: Moves.from_bytes(draw(st.binary(max_size=40))),
    }
    if world.owner != "engine":
        found["acquire room"] = lambda: m.acquire(tokens, now=now, reserve=draw(too_much))
    if world.held:
        lease = draw(st.sampled_from(world.held))
        found |= {
            "truncate": lambda: lease.truncate(lease.tokens + draw(st.integers(1, 9)), now=now),
            "truncate negative": lambda: lease.truncate(draw(negative), now=now),
            "fork": lambda: lease.fork(draw(negative | st.integers(min_value=2**21)), now=now),
            "commit tokens": lambda: lease.commit(draw(bad_tokens), now=now),
            "commit now": lambda: lease.commit([1], now=draw(bad_now)),
            "reserve": lambda: lease.reserve(draw(negative), now=now),
            "resume reserve": lambda: lease.resume(draw(negative), now=now),
            "resume load": lambda: lease.resume(now=now, load="some"),
            "load blocks": lambda: lease.load(blocks=(0, 10**6), now=now),
            "slots": lambda: lease.slots(draw(bad_tier)),
            "bind slots": lambda: lease.bind(0, draw(bad_slots)),
            "bind block": lambda: lease.bind(draw(negative | st.integers(min_value=10**9)), [1]),
            "suspend": lambda: lease.suspend("attic", now=now),
            "plan layer": lambda: lease.plan.recompute(draw(bad_layer)),
            "commit_many tokens": lambda: m.commit_many([lease.id], [draw(bad_tokens)], now=now),
            "commit_many twice": lambda: m.commit_many([lease.id] * 2, [[], []], now=now),
            "reset": m.reset,
            "scope": lambda: m.lookup(tokens, now=now, scope=other_structure(m)),
        }
        if lease.state == "active":
            found["resume"] = lambda: lease.resume(now=now)
            if world.owner != "engine":
                too_long = np.zeros(lease.room + 1, dtype=np.uint32)
                found["commit room"] = lambda: lease.commit(too_long, now=now)
                found["reserve room"] = lambda: lease.reserve(draw(too_much), now=now)
                found["bind"] = lambda: lease.bind(0, [1])
            if not lease.ready():
                found["commit early"] = lambda: lease.commit([], now=now)
    if world.released:
        lease = draw(st.sampled_from(world.released))
        found |= {
            "released slots": lease.slots,
            "released commit": lambda: lease.commit([1], now=now),
            "released plan": lambda: lease.plan,
            "released fork": lambda: lease.fork(1, now=now),
        }
    if world.taken:
        move = draw(st.sampled_from(world.taken))
        found["layers_done"] = lambda: m.complete(move, now=now, layers_done=draw(half))
        found["rank"] = lambda: m.complete(move, now=now, rank=2)
    if world.done:
        move = draw(st.sampled_from(world.done))
        found["contradiction"] = lambda: m.complete(move, now=now, ok=False)
    return found


@given(world=worlds, data=st.data())
def test_bad_calls_raise_and_change_nothing(world, data):
    found = calls(world, data.draw)
    before = world.manager.snapshot()
    for name in data.draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=12)):
        with pytest.raises(KvtrieError) as caught:
            found[name]()
        assert len(str(caught.value).split()) > 2, name
        assert world.manager.snapshot() == before, name
    world.manager.audit()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1, -7], "token 1 is -7, 0 to 4294967295 wanted"),
        (np.array([0, 2**32]), "token 1 is 4294967296"),
        ([0, 2**70], f"token 1 is {2**70}"),
        (np.ones(3), r"dtype float64 and shape \[3\]"),
        (np.ones(3, dtype=bool), "dtype bool"),
        (np.ones((2, 3), dtype=np.int32), r"dtype int32 and shape \[2, 3\]"),
        ([1, 2.0], "token 1 is float"),
        ([True, None], "token 1 is NoneType"),
    ],
)
def test_bad_tokens_are_named(given, said):
    with pytest.raises(ConfigError, match=said):
        make("one").lookup(given, now=0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m.lookup("text", now=0), "not str"),
        (lambda m: m.lookup(b"bytes", now=0), "not bytes"),
        (lambda m: m.lookup(None, now=0), "tokens are None"),
        (lambda m: m.lookup({1: 2}, now=0), "not dict"),
        (lambda m: m.lookup(5, now=0), "tokens are 5"),
        (lambda m: m.lookup_many(5, now=0), "tokens are 5"),
        (lambda m: m.lookup([1], now=0.5), "now is 0.5"),
        (lambda m: m.lookup([1], now=True), "now is True"),
        (lambda m: m.lookup([1], now="soon"), "now is 'soon'"),
        (lambda m: m.lookup([1], now=0, scope="tenant"), "scope is 'tenant', a Scope"),
        (lambda m: m.acquire([], now=0), "empty prompt"),
        (lambda m: m.acquire([1], now=0, session=5), "session is 5"),
        (lambda m: m.acquire([1], now=0, session="\ud800"), "session is .* surrogates"),
        (lambda m: m.acquire([1], now=0, load="\ud800"), "load is .* surrogates"),
        (lambda m: m.acquire([1], now=0, load=3), "load is 3"),
        (lambda m: m.transmit("\ud800", 1, now=0), "lane is .* surrogates"),
        (lambda m: m.transmit(7, 1, now=0), "lane is 7"),
        (lambda m: m.explain(0, tier="\ud800", now=0), "tier is .* surrogates"),
        (lambda m: m.complete([], ok="yes", now=0), "ok is 'yes'"),
        (lambda m: m.complete([], ok=False, error=5, now=0), "error is 5"),
        (lambda m: m.complete([0.5], now=0), "id 0 is 0.5"),
        (lambda m: m.mark([1], 0, present=1, now=0), "present is 1"),
        (lambda m: m.hint(5, now=0), "hints are 5"),
        (lambda m: m.hint(["keep"], now=0), "a hint is a Retain.* not 'str'"),
        (lambda m: m.set_costs([1], 5, now=0), "costs are 5"),
        (lambda m: m.set_costs([1], ["dear"], now=0), "cost 0 is 'dear'"),
        (lambda _: Index(5), "rows are 5"),
        (lambda _: BlockManager(MODEL, "gpu"), "tiers are 'gpu'"),
        (lambda _: BlockManager(MODEL, ["gpu", "host"]), "a tier is 'gpu', a Tier"),
        (lambda _: BlockManager("model", [Tier("gpu", blocks=1)]), "model is 'model', a Model"),
        (lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1)], cost=3), "cost is .* not 3"),
        (lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1)], policy=3), "policy is 3"),
        (
            lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1)], policy="arc"),
            "there is no policy 'arc', choose one of",
        ),
        (lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1)], reuse="no"), "reuse is 'no'"),
        (lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1)], epsilon="0"), "epsilon is '0'"),
        (lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1)], structure=None), "structure is N"),
        (
            lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1)], objective="time"),
            "objective is 'cost', 'balanced' or 'hits', not 'time'",
        ),
        (
            lambda _: BlockManager(MODEL, [Tier("gpu", blocks=1, policy="lru")], objective="hits"),
            "policy 'lru' has no values: choose one of retention, flat, weighted, learned",
        ),
    ],
)
def test_another_type_altogether_is_an_error_of_kvtrie(call, said):
    manager = make("one")
    before = manager.snapshot()
    with pytest.raises(ConfigError, match=said):
        call(manager)
    assert manager.snapshot() == before


def test_what_an_executor_says_is_taken_whatever_it_is():
    manager = make("two")
    for at in range(3):
        with manager.acquire(np.arange(12) + 100 * at, now=at) as lease:
            while len(moves := manager.moves()):
                manager.complete(moves.id, now=at, ok=False, error="a \ud800 file " * 999)
            lease.commit(np.arange(lease.matched, lease.room)[:8], now=at)
    manager.audit()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_deep_nesting_is_no_report_and_no_trace(tmp_path, text):
    path = tmp_path / "deep.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no report of kvtrie"):
        read_report(path)
    with pytest.raises(ConfigError, match="line 1: no JSON"):
        read_trace(path)
