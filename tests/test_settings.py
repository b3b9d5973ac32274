"""Settings: frozen dataclasses that refuse what cannot be, with the numbers in the message."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from kvtrie import (
    BlockManager,
    ConfigError,
    Cost,
    KvtrieError,
    Lane,
    LayerGroup,
    Layout,
    ModelShape,
    NoSpaceError,
    Quota,
    Retain,
    Scope,
    Tier,
)

MODEL = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="settings")
GPU = Tier("gpu", blocks=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelShape(0, 1, 1), "layers is 0"),
        (lambda: ModelShape(70_000, 1, 1), "70000"),
        (lambda: ModelShape(1, 0, 1), "kv_heads is 0"),
        (lambda: ModelShape(1, 1, -3), "head_dim is -3"),
        (lambda: ModelShape(1, 1, 1, dtype="float31"), "float31"),
        (lambda: ModelShape(1, 6, 1, tp=4), "6 KV heads do not divide over 4"),
        (lambda: Lane("", 1e9), "names"),
        (lambda: Lane("up", -5), "-5"),
        (lambda: Lane("up", float("inf")), "inf"),
        (lambda: Lane("up", 1e9, latency_ns=-2), "-2"),
        (lambda: Tier("tape", blocks=1), "tape"),
        (lambda: Tier("gpu"), "blocks is None, bytes is None"),
        (lambda: Tier("gpu", blocks=3, bytes=400), "blocks is 3, bytes is 400"),
        (lambda: Tier("gpu", blocks=0), "blocks of tier 'gpu' is 0, 1 to"),
        (lambda: Tier("gpu", blocks=2**32), "blocks of tier 'gpu' is 4294967296, 1 to"),
        (lambda: Tier("gpu", bytes=-1), "bytes of tier 'gpu' is -1, 1 to"),
        (lambda: Tier("gpu", blocks=1, owner="me"), "'me'"),
        (lambda: Tier("gpu", blocks=1, write="now"), "'now'"),
        (lambda: Tier("gpu", blocks=1, free_low=1.0), r"free_low.* 1\.0"),
        (lambda: Tier("gpu", blocks=1, growth_reserve=-0.5), r"-0\.5"),
        (lambda: Tier("gpu", blocks=1, admit_after=-1), "admit_after.* -1"),
        (lambda: Tier("gpu", blocks=1, io_budget=0), "io_budget.* 0"),
        (lambda: Scope(structure="tree"), "tree"),
        (lambda: Scope(extra=((-1, b"x"),)), "token of a digest is -1, 0 to"),
        (lambda: Scope(extra=((3, b""),)), "token 3 is empty"),
        (lambda: Scope(extra=((3, b"x"), (3, b"y"))), r"\[3, 3\]"),
        (lambda: Cost(alpha=-1.0), r"alpha is -1\.0"),
        (lambda: Cost(beta=float("nan")), "beta is nan"),
        (lambda: Cost(beta=0.0), "beta . constant is 0"),
        (lambda: Cost(ns_per_token=-3.0), r"-3\.0"),
        (lambda: Cost(table=()), r"\(\)"),
        (lambda: Cost(table=((0, 2.0), (8, 1.0))), r"\(0, 2\.0\) comes before \(8, 1\.0\)"),
        (lambda: Layout(alignment=0), "alignment is 0, 1 to"),
        (lambda: ModelShape(2.5, 1, 1), r"layers is 2\.5, a whole number"),
        (lambda: ModelShape(layers=True, kv_heads=1, head_dim=1), "layers is True, a whole number"),
        (lambda: ModelShape("4", 1, 1), "layers is '4', a whole number"),
        (lambda: ModelShape(float("nan"), 1, 1), "layers is nan"),
        (lambda: ModelShape(10**5000, 1, 1), "layers is an integer of 16610 bits"),
        (lambda: ModelShape(1, None, 1), "kv_heads is None"),
        (lambda: ModelShape(1, 1, 1, latent=1), "latent is 1, True or False"),
        (lambda: ModelShape(1, 1, 1, fingerprint="\ud800"), "fingerprint is .* surrogates"),
        (lambda: ModelShape(1, 1, 1, groups=5), "groups is 5"),
        (lambda: ModelShape(1, 1, 1, groups=((0,),)), r"a layer group is \(0,\), a LayerGroup"),
        (lambda: Lane("up", 0), "bytes_per_s of lane 'up' is 0, 1 to"),
        (lambda: Lane("up", 0.5), r"is 0\.5, 1 to"),
        (lambda: Lane("up", "fast"), "is 'fast'"),
        (lambda: Lane("up", bytes_per_s=True), "is True"),
        (lambda: Lane(5, 1e9), "name of a lane is 5, a str"),
        (lambda: Lane("\udc80", 1e9), "name of a lane is .* surrogates"),
        (lambda: Lane("up", 1e9, shares="\ud800"), "shares of a lane is .* surrogates"),
        (lambda: Tier("gpu", blocks=1, read=1e9), r"read of tier 'gpu' is .*, a Lane wanted"),
        (lambda: Tier(["gpu"], blocks=1), "kind of a tier is one of"),
        (lambda: Tier("gpu", bytes=8.5e-1), r"bytes of tier 'gpu' is 0\.85, a whole"),
        (lambda: Tier("gpu", bytes=float("inf")), "bytes of tier 'gpu' is inf"),
        (lambda: Tier("gpu", bytes="8e9"), "bytes of tier 'gpu' is '8e9'"),
        (lambda: Tier("gpu", blocks=True), "blocks of tier 'gpu' is True"),
        (lambda: Tier("gpu", blocks=1, free_low=float("nan")), "free_low of tier 'gpu' is nan"),
        (lambda: Tier("gpu", blocks=1, layer_slots="no"), "layer_slots of tier 'gpu' is 'no'"),
        (lambda: Tier("disk", blocks=1, path="\ud800"), "path of tier 'disk' is"),
        (lambda: Tier("disk", blocks=1, path="a\0b"), "path of tier 'disk' is"),
        (lambda: Tier("disk", blocks=1, path=5), "path of tier 'disk' is"),
        (lambda: Scope(tenant="me"), "tenant is 'me', bytes"),
        (lambda: Scope(tenant=bytes(2**16)), "tenant has 65536 bytes"),
        (lambda: Scope(lora="\ud800"), "lora is .* surrogates"),
        (lambda: Scope(lora=b"x"), "lora is b'x', a str"),
        (lambda: Scope(extra=((3, 10**12),)), "a digest is 1000000000000, bytes"),
        (lambda: Scope(extra=(3,)), "extra of a scope is 3"),
        (lambda: Scope(extra=((1.5, b"x"),)), r"token of a digest is 1\.5"),
        (lambda: Cost(alpha="1"), "alpha is '1'"),
        (lambda: Cost(table=((0.5, 1.0),)), r"context of a cost is 0\.5"),
        (lambda: Cost(table=(0, 1)), "a pair in table of costs is 0"),
        (lambda: Layout(strides=(1, 2)), "2 strides given for 6 axes"),
        (lambda: Layout(dtype=5), "dtype is one of"),
        (lambda: Layout(order="block"), "an axis of order is one of"),
        (lambda: MODEL.layer_bytes(2.5), r"block_tokens is 2\.5"),
        (lambda: Retain(session="\ud800"), "session is .* surrogates"),
        (lambda: Retain(session="s", owner=5), "owner is 5"),
        (lambda: Retain(session="s", priority=50.5), r"priority is 50\.5"),
        (lambda: Retain(session="s", scope="tenant"), "scope is 'tenant', a Scope"),
        (lambda: Quota(tenant="me"), "tenant of a quota is 'me'"),
        (lambda: Quota(tenant=b"", share="all"), "share of a quota is 'all'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiers": []}, "0 tiers"),
        ({"tiers": [GPU] * 5}, "5 tiers"),
        ({"tiers": [Tier("host", blocks=1), GPU]}, "tier 1 is 'gpu'"),
        ({"tiers": [GPU, Tier("remote", blocks=1)]}, "'host', which is missing"),
        ({"tiers": [Tier("gpu", bytes=8191)]}, "8191 bytes, which is 0 blocks of 8192"),
        ({"tiers": [Tier("gpu", blocks=1, policy="best")]}, "'best'"),
        ({"tiers": [Tier("gpu", blocks=1, owner="engine")]}, "'engine'"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"block_tokens": -16}, "block_tokens is -16"),
        ({"block_tokens": 2**40}, "block_tokens is 1099511627776"),
        ({"policy": "luck"}, "'luck'"),
        ({"cost": "cheap"}, "'cheap'"),
        ({"structure": "tree"}, "'tree'"),
        ({"drop_order": "random"}, "'random'"),
        ({"token_weight": 0}, "token_weight is 0"),
        ({"block_tokens": 2**20, "token_weight": 2**20}, "1048576 times token_weight 1048576"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 65}, "ranks is 65"),
        ({"events": -1}, "events is -1"),
        ({"events_of": "moves"}, "events_of is 'evictions' or 'residency', not 'moves'"),
        ({"machine": -1}, "machine is -1"),
    ],
)
def test_a_manager_refuses_settings_that_contradict_each_other(change, message):
    settings = {"tiers": [GPU]} | change
    with pytest.raises(ConfigError, match=message):
        BlockManager(MODEL, **settings)


def test_settings_are_frozen_equal_by_value_and_picklable():
    tier = Tier("gpu", blocks=3, read=Lane("up", 1e9), layout=Layout())
    for setting in (MODEL, tier, Scope(b"a", "b", ((1, b"c"),)), Cost.seed(), LayerGroup((0,))):
        assert pickle.loads(pickle.dumps(setting)) == setting  # noqa: S301
        assert hash(setting) == hash(dataclasses.replace(setting))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(setting, dataclasses.fields(setting)[0].name, 1)


def test_cost_presets():
    assert Cost.default(MODEL).alpha == 1 / 10_700
    assert Cost.default(MODEL).ns_per_token == 10_000  # hidden is unknown
    sized = dataclasses.replace(MODEL, hidden=1000)
    assert Cost.ns_of(sized) == pytest.approx(2 * 12 * 4 * 1000**2 / 1e14 * 1e9)
    seed = Cost.seed()
    assert (seed.alpha, seed.beta, seed.constant, seed.table) == (0.001, 0.01, 0.005, None)


@pytest.mark.parametrize(
    ("cost", "at_0", "at_32"),
    [
        ("default", 1.0, 1 + 32 / 10_700),
        ("seed", 0.015, 0.047),
        (Cost(alpha=0.5, beta=2.0, constant=1.0), 3.0, 19.0),
        (Cost(table=((0, 1.0), (64, 3.0))), 1.0, 2.0),
    ],
)
def test_a_manager_prices_by_its_cost(cost, at_0, at_32):
    manager = BlockManager(MODEL, [GPU], cost=cost, policy="retention")
    assert manager.cost(0, 0, 1, 0) == pytest.approx(at_0)
    assert manager.cost(0, 0, 1, 32) == pytest.approx(at_32)


def test_errors_keep_their_numbers_through_pickle():
    error = NoSpaceError("no room", "gpu", 5, 1, 2, 3)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.tier, again.wanted) == ("no room", "gpu", 5)
    assert (again.free, again.coming, again.leased) == (1, 2, 3)
    assert isinstance(error, KvtrieError)
    assert isinstance(error, MemoryError)
