"""SGLang 0.5.23: its radix trees, whole requests, evictions, memory.

`rust` is UnifiedRadixCache with the Rust tree core, SGLang's default; `unified` the same with the
Python core; `radix` the older RadixCache. A request is `match_prefix`, lock, slots of the matched
path, `evict` of the exact shortfall, `insert` of prompt and answer, the lock's move to the new
node, unlock. Taking pages from the pool is not timed; giving them back is. Needs sglang's files and
torch in this interpreter. Cost: ten seconds a trace for `rust`, half a minute for the others.
"""

from __future__ import annotations

import argparse
import gc
from array import array
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benches.peers.stand_ins import Pool  # isort: skip - without it sglang does not load

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benches.measure import Clock, emit, percentile, resident_bytes
from benches.workload import BLOCK, LRU_POOL, RUNNING, SEED, SEQUENCE, VOCABULARY, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

PEERS = {"rust": "SGLang Rust", "unified": "SGLang Python unified", "radix": "SGLang Python"}
PARTS = ("lookup", "lock", "indices", "evict", "insert", "unlock")


class Tree:
    """One face for the three trees. `lock` returns what `unlock` wants back."""

    def __init__(self, kind: str, pool: Pool) -> None:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=pool,
            page_size=BLOCK,
        )
        self.lock: Any
        self.unlock: Any
        self.indices: Any
        if kind == "radix":
            tree = RadixCache(params)
            self.lock = lambda node: (tree.inc_lock_ref(node), node)[1]
            self.unlock, self.indices = tree.dec_lock_ref, tree.path_device_indices
        else:
            params.tree_components = (ComponentType.FULL,)
            params.tree_core_backend = "rust" if kind == "rust" else "python"
            tree = UnifiedRadixCache(params)
            core, root = tree.tree_core, tree.tree_core.root_node_handle()
            assert type(core).__name__.startswith("Rust") == (kind == "rust")
            self.lock, self.unlock = tree.lock, tree.unlock
            self.indices = lambda node: core.collect_full_device_indices(node, root)
        self.match, self.insert, self.evict = tree.match_prefix, tree.insert, tree.evict


def play(
    trace: Iterable[tuple[int, int, np.ndarray]],
    tree: Tree,
    pool: Pool,
    clock: Clock,
    stop_at: float | None = None,
) -> tuple[int, int, int]:
    """Play the trace; return prompt blocks, those found, and blocks stored."""
    running: deque[Any] = deque()
    requested = found = stored = 0
    for _, prompt, tokens in trace:
        full = tokens[: len(tokens) // BLOCK * BLOCK].astype(np.int64)
        whole = array("q", full.tobytes())
        question = whole[: prompt // BLOCK * BLOCK]
        clock.start()
        match = tree.match(MatchPrefixParams(key=RadixKey(question)))
        clock.lap("lookup")
        lock = tree.lock(match.last_device_node)
        clock.lap("lock")
        old = tree.indices(match.last_device_node)
        clock.lap("indices")
        need = (len(whole) - match.device_prefix_len) // BLOCK
        while pool.free_blocks < need:
            clock.start()
            tree.evict(EvictParams(num_tokens=(need - pool.free_blocks) * BLOCK))
            clock.lap("evict")
            if pool.free_blocks < need:
                tree.unlock(running.popleft())
                clock.lap("unlock")
        slots = torch.cat([old, pool.alloc(need)])
        clock.start()
        new = tree.insert(
            InsertParams(key=RadixKey(whole), value=slots, prev_prefix_len=match.device_prefix_len)
        )
        clock.lap("insert")
        running.append(tree.lock(new.last_device_node))
        tree.unlock(lock)
        clock.lap("lock")
        if len(running) > RUNNING:
            clock.start()
            tree.unlock(running.popleft())
            clock.lap("unlock")
        clock.next()
        requested += prompt // BLOCK
        found += match.device_prefix_len // BLOCK
        stored += need
        if stop_at is not None and stored >= stop_at:
            break
    return requested, found, stored


def bench_request(given: argparse.Namespace) -> None:
    trace, pool, clock = Trace(given.seed), Pool(given.blocks), Clock(*PARTS)
    requested, found, _ = play(trace, Tree(given.tree, pool), pool, clock)
    peer = PEERS[given.tree]
    context = {"blocks": given.blocks, "requests": len(trace), "seed": given.seed}
    context["hit_rate"] = round(found / requested, 4)
    emit(peer, "request", clock.us().mean(), "us", parts=clock.means(), **context)
    emit(peer, "lookup.mean", clock.us("lookup").mean(), "us", **context)
    emit(peer, "lookup.p99", percentile(clock.us("lookup"), 0.99), "us", **context)


def bench_leaves(given: argparse.Namespace) -> None:
    """Each step evicts 4 blocks and inserts 4 in a full pool of sequences of 4 blocks."""
    draw, pool = np.random.default_rng(given.seed), Pool(4 * given.leaves)
    tree = Tree(given.tree, pool)

    def insert() -> float:
        key = array("q", draw.integers(1, VOCABULARY, size=4 * BLOCK).tobytes())
        slots = pool.alloc(4)
        t = perf_counter()
        tree.insert(InsertParams(key=RadixKey(key), value=slots))
        return 1e6 * (perf_counter() - t)

    def evict() -> float:
        t = perf_counter()
        tree.evict(EvictParams(num_tokens=4 * BLOCK))
        return 1e6 * (perf_counter() - t)

    for _ in range(given.leaves):
        insert()
    gc.freeze()
    times = [evict() + insert() for _ in range(300 if given.tree == "rust" else 60)]
    context = {"leaves": given.leaves, "steps": len(times)}
    context["p99"] = round(percentile(times, 0.99), 2)
    emit(PEERS[given.tree], "evict", percentile(times, 0.5), "us", **context)


def bench_memory(given: argparse.Namespace) -> None:
    """Tokens and slots, 8 + 8 bytes a token, and the free list."""
    trace, pool = Trace(given.seed), Pool(1000)
    # Load everything that first use loads.
    play(trace, Tree(given.tree, pool), pool, Clock(*PARTS), 900)
    before, pool = resident_bytes(), Pool(given.blocks)
    tree = Tree(given.tree, pool)
    _, _, stored = play(trace, tree, pool, Clock(*PARTS), 0.99 * given.blocks)
    grown = resident_bytes() - before
    emit(PEERS[given.tree], "memory", grown / stored, "B", blocks=stored)


def bench_scaling(given: argparse.Namespace) -> None:
    """A full pool of sequences of 32 blocks: one found, locked and unlocked; one replaced."""
    draw, pool, stored = np.random.default_rng(given.seed), Pool(given.blocks), []
    tree, number = Tree(given.tree, pool), given.blocks // SEQUENCE
    shortfall = EvictParams(num_tokens=SEQUENCE * BLOCK)

    def insert(key: RadixKey) -> None:
        new = tree.insert(InsertParams(key=key, value=pool.alloc(SEQUENCE)))
        tree.unlock(tree.lock(new.last_device_node))

    def drawn() -> RadixKey:
        return RadixKey(array("q", draw.integers(1, VOCABULARY, SEQUENCE * BLOCK).tobytes()))

    for i in range(number):
        key = drawn()
        insert(key)
        if i % max(1, number // given.found) == 0:
            stored.append(key)
    gc.freeze()
    found, replaced = array("d"), array("d")
    for i in range(3000):
        key = stored[i % len(stored)]
        t = perf_counter()
        match = tree.match(MatchPrefixParams(key=key))
        lock = tree.lock(match.last_device_node)
        tree.indices(match.last_device_node)
        tree.unlock(lock)
        found.append(perf_counter() - t)
        assert match.device_prefix_len == SEQUENCE * BLOCK
    for _ in range(500):
        key = drawn()
        t = perf_counter()
        tree.evict(shortfall)
        insert(key)
        replaced.append(perf_counter() - t)
    emit(PEERS[given.tree], "hit", 1e6 * percentile(found, 0.5), "us", blocks=given.blocks)
    emit(PEERS[given.tree], "replace", 1e6 * percentile(replaced, 0.5), "us", blocks=given.blocks)


BENCHES = {
    "request": bench_request,
    "leaves": bench_leaves,
    "memory": bench_memory,
    "scaling": bench_scaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--tree", default="rust", choices=PEERS)
    parser.add_argument("--blocks", type=int, help="default: 100 000; for memory a million")
    parser.add_argument("--leaves", type=int, default=50_000)
    parser.add_argument("--found", type=int, default=500, help="sequences that scaling asks again")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    given.blocks = given.blocks or (1_000_000 if given.what == "memory" else LRU_POOL)
    torch.set_num_threads(1)
    BENCHES[given.what](given)


if __name__ == "__main__":
    main()
