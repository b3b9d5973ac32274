"""Bytes of groups of layers between two tiers: a request finds each block with its own bytes."""

from dataclasses import replace

import pytest
from group_world import FULL, MODELS, SIZE, STATE, World, play

from kvtrie import BlockManager, ConfigError, ModelShape, ResumePoints, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.deep)])
@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_every_group_keeps_its_bytes_over_random_moves(groups, seed):
    with World(groups, gpu=60_000, host=160_000, seed=seed) as world:
        play(world, 250)
    assert sum(world.found) > 500
    assert min(world.moved.values()) > 0
    assert min(world.compared) > 100


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_copies_that_fail_in_any_group_are_misses(groups):
    with World(groups, gpu=60_000, host=160_000, seed=3, fails=0.2) as world:
        play(world, 400)
    assert min(world.failed.values()) > 0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["windows", "other heads and sinks"])
def test_holes_are_computed_in_slots_of_the_requests_own(name, seed):
    rooms = {"gpu": 60_000, "host": 160_000}
    with World(MODELS[name], **rooms, seed=seed, fails=0.02, structure="holes") as world:
        play(world, 250)
    assert world.filled > 10
    assert sum(world.found) > 500


def test_what_groups_cannot_have_is_refused():
    resume = ResumePoints()
    model = ModelShape(8, 2, 8, groups=MODELS["states"])
    gpu = Tier("gpu", bytes=40_000)
    with pytest.raises(ConfigError, match="ranks is 1 and staging 2 blocks"):
        open_pools(model, [gpu], SIZE, resume=resume, staging=2)
    kept = Tier("host", bytes=40_000, keep="kv")
    with pytest.raises(ConfigError, match="fingerprint"):
        open_pools(model, [gpu, kept], SIZE, resume=resume)
    odd = replace(STATE, state_bytes=89)
    with pytest.raises(ConfigError, match="89 bytes for 2 layers"):
        open_pools(replace(model, groups=(FULL, odd)), [gpu], SIZE, resume=resume)
    manager = BlockManager(model, [gpu], block_tokens=SIZE, resume=resume)
    with pytest.raises(ConfigError, match="differ: block_tokens 4 and 8"):
        Executor(manager, open_pools(model, [gpu], 2 * SIZE, resume=resume))
    plain = BlockManager(replace(model, groups=()), [gpu], block_tokens=SIZE)
    with pytest.raises(ConfigError, match="keeps 2 groups of layers apart, the manager 1"):
        Executor(plain, open_pools(model, [gpu], SIZE, resume=resume))
