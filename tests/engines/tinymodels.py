"""Tiny models with wide weights, whose logits depend on every key, and what serves them."""

from __future__ import annotations

import logging

import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from kvtrie import BlockManager, Cost, ModelShape, Tier
from kvtrie.tiers import Pool, open_pools
from kvtrie.transfer import Executor

log = logging.getLogger(__name__)

BLOCK = 8
COMMON = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "initializer_range": 0.15,  # wide, so that logits depend on every key
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}


class Lossy(Pool):
    """A first tier into which chosen units of the second cannot be copied."""

    lost: frozenset[int] = frozenset()

    def copy_from(self, source, source_units, units):
        if self.lost.intersection(source_units.tolist()):
            raise OSError("unreadable")
        super().copy_from(source, source_units, units)


def serve(model, gpu=80, host=0, *, layer_slots=False, structure="holes", lossy=False, policy=None):
    """An executor without threads over a manager for `model`."""
    shape = ModelShape.from_config(model.config)
    tiers = [Tier("gpu", blocks=gpu, layer_slots=layer_slots, policy=policy)]
    tiers += [Tier("host", blocks=host)] if host else []
    dear = Cost(ns_per_token=1e9)  # computing costs more than any load
    manager = BlockManager(shape, tiers, block_tokens=BLOCK, structure=structure, cost=dear)
    pools = list(open_pools(shape, tiers, BLOCK))
    if lossy:
        pools[0] = Lossy(shape, gpu, BLOCK, layer_slots=layer_slots)
    for pool in pools:
        for plane in pool.planes:
            plane.fill_(255)  # NaN: whatever is read without having been written shows
    return Executor(manager, pools, workers=0, moves_per_job=1)


def some(seed, *shape):
    return torch.randint(1, 211, shape, generator=torch.Generator().manual_seed(seed))


def answer(model, ids, cache=None, steps=8, **how):
    """Output of `generate`; without a mask it would hide a pad token that an answer contained."""
    return model.generate(
        ids,
        attention_mask=how.pop("attention_mask", torch.ones_like(ids)),
        past_key_values=cache,
        max_new_tokens=steps,
        return_dict_in_generate=True,
        output_logits=True,
        **({"do_sample": False} | how),
    )


def agree(truth, mine):
    """The same tokens, or a tie that float32 does not decide."""
    for row, (right, got) in enumerate(zip(truth.sequences, mine.sequences, strict=True)):
        wrong = (right != got).nonzero().flatten().tolist()
        if not wrong:
            continue
        step = wrong[0] - (len(right) - len(truth.logits))
        expected = truth.logits[step][row]
        best, second = expected.topk(2).values.tolist()
        log.warning("tie in row %d at step %d: margin %.1e", row, step, best - second)
        assert best - second < 1e-3
        assert (expected - mine.logits[step][row]).abs().max() < 1e-4


def full(model, ids):
    """Logits and KV of one uncached pass."""
    cache = DynamicCache(config=None)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
    return logits, [(layer.keys, layer.values) for layer in cache.layers]


def stored_kv(cache, tokens):
    """K, V `(heads, tokens, dim)` of every layer in the blocks of a cache's first row."""
    pool, lease = cache._batch.pool, cache.leases[0]
    at = torch.arange(tokens)
    return [
        tuple(each.transpose(0, 1) for each in pool.gather(units[at // BLOCK], at % BLOCK))
        for units in pool.table(lease.slots(0))
    ]


def close(cache, truth, tokens):
    for (keys, values), (right_keys, right_values) in zip(
        stored_kv(cache, tokens), truth, strict=True
    ):
        assert (keys - right_keys[0, :, :tokens]).abs().max() < 1e-4
        assert (values - right_values[0, :, :tokens]).abs().max() < 1e-4


class before(TorchFunctionMode):  # noqa: N801 - it reads as a function does
    """Call `act` before each use of a module's first matrix.

    A hook, or another `forward`, would make another model of it.
    """

    def __init__(self, module, act):
        super().__init__()
        self._first, self._act = next(module.parameters()), act

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and args[1] is self._first:
            self._act()
        return func(*args, **(kwargs or {}))


def lose(executor, ids, wanted, scope=None):
    """Make blocks of a prompt that are only on the second tier unreadable, and return them."""
    executor.drain()
    gpu, host = executor.pools
    match = executor.manager.lookup(ids[0].numpy(), now=executor.clock(), scope=scope)
    below = {
        index: copy.slot
        for index, block in enumerate(match.blocks)
        for copy in block.copies
        if copy.tier == 1 and len(block.copies) == 1
    }
    lost = sorted(below.keys() & wanted)
    assert lost
    gpu.lost = frozenset(
        unit for index in lost for unit in host.units(below[index], 0, host.layers).tolist()
    )
    return lost
