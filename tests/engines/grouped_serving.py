"""Families of models over tiers with little room, and their answers with and without kvtrie."""

from __future__ import annotations

from dataclasses import replace

import torch
from tinymodels import agree, answer
from transformers import DynamicCache

from kvtrie import BlockManager, Cost, ResumePoints, Tier
from kvtrie.demo.families import VOCABULARY
from kvtrie.engines.transformers import KvtrieCache, fingerprint, model_shape
from kvtrie.engines.transformers.layer_trial import try_layers
from kvtrie.tiers import Pool, open_pools
from kvtrie.transfer import Executor

BLOCK = 8


def serve(
    model,
    *,
    gpu=30,
    host=0,
    points=8,
    workers=0,
    shaped=None,
    disk=None,
    remote=None,
    layout=None,
    structure="leaf-only",
):
    """An executor over tiers with room for blocks of the first group and some resume points."""
    shape = model_shape(shaped or model, fingerprint=fingerprint(model))
    sizes = [shape.block_bytes(BLOCK, group) for group in range(max(1, len(shape.groups)))]
    # A point has a state or two blocks of a window.
    point = sum(
        size * (1 if group.state_bytes else 2)
        for size, group in zip(sizes, shape.groups, strict=False)
    )
    rooms = {"gpu": gpu * sizes[0] + points * point, "host": host * sizes[0] + 4 * points * point}
    tiers = [
        Tier(kind, bytes=rooms[kind], layout=layout if kind == "host" else None)
        for kind in ("gpu", "host")
        if kind == "gpu" or host
    ]
    if disk is not None:
        tiers.append(Tier("disk", bytes="8MB", path=str(disk), layout=layout))
    if remote is not None:  # other processes find what is in the store
        tiers = [replace(tier, write="through") for tier in tiers]
        tiers.append(Tier("remote", blocks=5000, path=f"folder:{remote}", layout=layout))
    dear = Cost(ns_per_token=1e9)  # computing costs more than any load
    resume = ResumePoints() if shape.groups else None
    manager = BlockManager(
        shape, tiers, block_tokens=BLOCK, cost=dear, resume=resume, structure=structure
    )
    pools = open_pools(shape, tiers, BLOCK, resume=resume)
    for pool in pools:  # NaN: whatever is read without having been written shows
        for plane in pool.planes if isinstance(pool, Pool) else ():
            plane.fill_(255)
    return Executor(manager, pools, workers=workers)


def has_states(model):
    return any(layer.states for layer in try_layers(model).layers)


def some(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def apart(truth, mine):
    """The largest difference of logits up to the first token that differs."""
    worst = 0.0
    for step, (right, got) in enumerate(zip(truth.logits, mine.logits, strict=True)):
        worst = max(worst, float((right - got).abs().max()))
        at = truth.sequences.shape[1] - len(truth.logits) + step
        if not torch.equal(truth.sequences[:, at], mine.sequences[:, at]):
            break
    return worst


def allowed(model, ids, truth):
    """How far logits may be apart: with states, twice as far as token by token from half on."""
    config = model.config.get_text_config(decoder=True)
    cache, half = DynamicCache(config=config), ids.shape[1] // 2
    if not has_states(model):
        return 1e-4
    with torch.no_grad():
        model(ids[:, :half], past_key_values=cache)
        for at in range(half, ids.shape[1] - 1):
            model(ids[:, at : at + 1], past_key_values=cache)
    return max(1e-4, 2 * apart(truth, answer(model, ids, cache, steps=len(truth.logits))))


def push(model, executor, prompts, blocks=12):
    """Let other prompts push what is cached to the tiers below."""
    for seed in range(prompts):
        ids = some(1000 + seed, 1, blocks * BLOCK)
        with KvtrieCache(model, executor, ids, reserve=1) as cache:
            answer(model, ids, cache, steps=1)
    executor.drain()


def ask(model, executor, ids, steps=8, **how):
    """Answer a prompt with and without kvtrie; return the sequence and the tokens found."""
    truth = answer(model, ids, steps=steps, **how)
    bound = 1e-4 if how else allowed(model, ids, truth)
    mask = how.get("attention_mask")
    with KvtrieCache(
        model, executor, ids, reserve=steps, attention_mask=mask, lookup_s=30.0
    ) as cache:
        found = [lease.matched for lease in cache.leases]
        mine = answer(model, ids, cache, steps=steps, **how)
    agree(truth, mine)
    assert apart(truth, mine) < bound
    return truth.sequences, found
