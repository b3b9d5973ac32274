"""Time to the first token of a second turn of a model with states, with and without a cache.

Invariant: both are measured in turn, on one thread. Cost: seconds per round.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from benches.hybrid.core import BLOCK
from benches.record import Result, bounded
from kvtrie.demo.families import VOCABULARY, family
from kvtrie.engines.transformers import open as open_kv

if TYPE_CHECKING:
    from kvtrie.engines.transformers import OpenModel


def first_token(tokens: int, rounds: int) -> Result:
    """Time to the first token of a second turn, after a first one and without a cache."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model: Any = family("qwen3-next")
    generator = torch.Generator().manual_seed(0)

    def first(ids: torch.Tensor, opened: OpenModel | None) -> tuple[float, int]:
        began = perf_counter()
        if opened is None:
            model.generate(ids, max_new_tokens=1, do_sample=False)
            return perf_counter() - began, 0
        with opened.cache(ids, reserve=1) as cache:
            model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
            return perf_counter() - began, cache.leases[0].matched

    ours: list[float] = []
    peer: list[float] = []
    found = 0
    with open_kv(model, gpu="64MB", host="64MB", block_tokens=BLOCK) as opened:
        for _ in range(rounds):
            ids = torch.randint(1, VOCABULARY, (1, tokens), generator=generator)
            first(ids[:, : tokens - 64], opened)
            seconds, found = first(ids, opened)
            ours.append(seconds)
            peer.append(first(ids, None)[0])
    torch.set_num_threads(threads)
    more = {"tokens": tokens, "found": found, "rounds": rounds}
    what = "first token: second turn, qwen3-next tiny"
    return bounded(what, median(ours) * 1e3, median(peer) * 1e3, "ms", "no cache", 0.3, **more)
