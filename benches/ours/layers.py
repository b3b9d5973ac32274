"""Layer-wise bookkeeping of kvtrie: lookup, store and retrieve of one long prompt, no bytes moved.

Everything is real but the copies: leases, plans, moves, streams, reports. Calls have the same
names as those that the peer's driver makes. `--naive` plays our own stand-in instead: a
dictionary with one entry per chunk and layer, which is the shape that the peer has published.
Cost: seconds.
"""

from __future__ import annotations

import argparse
import hashlib
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import track

from benches.core.rows import OURS
from benches.measure import emit
from benches.workload import SEED, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Callable

STAND_IN = "naive dictionary"
LAYERS, HEADS, DIM = 32, 1, 8
PARTS = ("lookup", "store", "retrieve")


class Naive:
    """One entry per chunk and layer, under a lock, with a reference count and an LRU order."""

    def __init__(self, chunk: int) -> None:
        import threading
        from collections import OrderedDict

        self.chunk = chunk
        self.entries: OrderedDict[tuple[bytes, int], list[int]] = OrderedDict()
        self.lock = threading.Lock()

    def keys(self, tokens: np.ndarray) -> list[list[tuple[bytes, int]]]:
        """By layer, the chunks' keys: each chunk's hash covers all before it."""
        before, names = b"", []
        for at in range(0, len(tokens), self.chunk):
            before = hashlib.blake2b(before + tokens[at : at + self.chunk].tobytes()).digest()
            names.append(before)
        return [[(name, layer) for name in names] for layer in range(LAYERS)]

    def store(self, tokens: np.ndarray) -> None:
        """Make an entry for each chunk and layer."""
        for layer in self.keys(tokens):
            for key in layer:
                with self.lock:
                    self.entries[key] = [0]

    def lookup(self, tokens: np.ndarray) -> int:
        """Tokens that are there at all layers, pinned."""
        found = 0
        layers = self.keys(tokens)
        for at in range(len(layers[0])):
            for layer in layers:
                with self.lock:
                    if layer[at] not in self.entries:
                        return found
                    self.entries[layer[at]][0] += 1
            found += self.chunk
        return found

    def retrieve(self, tokens: np.ndarray) -> None:
        """Touch and unpin each entry, layer by layer."""
        for layer in self.keys(tokens):
            for key in layer:
                with self.lock:
                    self.entries[key][0] -= 1
                    self.entries.move_to_end(key)


class Timed:
    """Milliseconds of calls by name."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {part: [] for part in PARTS}

    def __call__(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the call's result and record its time."""
        start = perf_counter()
        given = call(*arguments)
        self.ms[part].append(1e3 * (perf_counter() - start))
        return given


def nothing(*_: Any) -> None:
    """Copy nothing, in the place of a connector's copies."""


def ours(tokens: int, prompts: int, block: int, seed: int) -> Timed:
    """Play kvtrie."""
    from kvtrie import BlockManager, ModelShape, Tier
    from kvtrie.tiers import open_pools
    from kvtrie.transfer import Executor, LayerwiseEngine

    shape = ModelShape(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")
    blocks = tokens // block
    tiers = [
        Tier("gpu", blocks=blocks + 1, write="through"),
        Tier("host", blocks=(prompts + 1) * 2 * blocks),
    ]
    manager = BlockManager(shape, tiers, block_tokens=block)
    pools = open_pools(shape, tiers, block, staging=blocks)
    timed, random = Timed(), np.random.default_rng(seed)
    with Executor(manager, pools, workers=0) as executor, LayerwiseEngine(executor) as engine:
        engine.connector.copy = nothing  # type: ignore[method-assign]

        def store(prompt: np.ndarray) -> None:
            with engine.acquire(prompt, keep=0) as lease:
                for _ in engine.store_layer(lease, prompt):
                    pass
            executor.drain()

        def retrieve(prompt: np.ndarray) -> int:
            with engine.acquire(prompt, keep=0, load="all") as lease:
                *_, hit = engine.retrieve_layer(lease)
            return hit

        def lookup(prompt: np.ndarray) -> int:
            return manager.lookup(prompt, now=executor.clock(), keep=0).tokens

        for _ in track(range(prompts), description=f"kvtrie, blocks of {block}", transient=True):
            prompt, other = random.integers(1, VOCABULARY, (2, tokens), dtype=np.uint32)
            timed("store", store, prompt)
            store(other)  # sends the prompt to the host
            assert timed("lookup", lookup, prompt) == tokens
            assert timed("retrieve", retrieve, prompt) == tokens
    return timed


def naive(tokens: int, prompts: int, chunk: int, seed: int) -> Timed:
    """Play the stand-in."""
    entries, timed, random = Naive(chunk), Timed(), np.random.default_rng(seed)
    for _ in track(range(prompts), description="naive dictionary", transient=True):
        prompt = random.integers(1, VOCABULARY, tokens, dtype=np.uint32)
        timed("store", entries.store, prompt)
        assert timed("lookup", entries.lookup, prompt) == tokens
        timed("retrieve", entries.retrieve, prompt)
    return timed


def main() -> None:
    """Play one of them and print its lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--block", type=int, default=256, help="the peer's chunks have 256 tokens")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--naive", action="store_true", help="play the stand-in for the peer")
    given = parser.parse_args()
    play, peer = (naive, STAND_IN) if given.naive else (ours, OURS)
    timed = play(given.tokens, given.prompts, given.block, given.seed)
    for part, ms in timed.ms.items():
        context = {"tokens": given.tokens, "layers": LAYERS, "block": given.block}
        context["median"] = round(sorted(ms)[len(ms) // 2], 4)
        emit(peer, f"layerwise.{part}", min(ms), "ms", **context)


if __name__ == "__main__":
    main()
