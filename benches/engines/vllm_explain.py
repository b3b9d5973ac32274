"""Time of `explain_miss` of one long prompt, and of hashing its tokens into blocks as vLLM does.

    .engines/vllm/bin/python -m benches.engines.vllm_explain

The prompt parts after a thousand tokens from eight cached branches as long as itself, in which the
rest of it recurs. Both are timed in turns; prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from time import perf_counter

import numpy as np
from vllm import SamplingParams
from vllm.config import CacheConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtrie import BlockManager, ModelShape, Tier

BLOCK, BRANCHES, SHARED = 16, 8, 1000
WORDS = 100_000


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    draw = np.random.default_rng(3)
    text = draw.integers(1, WORDS, given.tokens).astype(np.uint32)
    shape = ModelShape(layers=1, kv_heads=1, head_dim=4)
    blocks = (BRANCHES + 1) * (given.tokens // BLOCK + 2)
    manager = BlockManager(shape, [Tier("host", blocks=blocks)], block_tokens=BLOCK, explain=True)
    for at in range(BRANCHES):
        branch = np.insert(text, SHARED, [WORDS + at] * (at + 1)).astype(np.uint32)
        with manager.acquire(branch, now=at, keep=0) as lease:
            lease.commit(branch[lease.matched :], now=at)
    hashed = get_hash_fn_by_name(CacheConfig().prefix_caching_hash_algo)
    init_none_hash(hashed)
    hasher = get_request_block_hasher(BLOCK, hashed)
    prompt = text.tolist()
    explained, hashing = [], []
    for _ in range(given.rounds):
        begun = perf_counter()
        miss = manager.explain_miss(text, now=BRANCHES)
        causes = {cause for *_, cause in miss.causes}  # compares the branches
        explained.append(perf_counter() - begun)
        begun = perf_counter()
        request = Request("one", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        hashing.append(perf_counter() - begun)
        assert len(request.block_hashes) == given.tokens // BLOCK
        assert "diverged" in causes, miss.causes
    outputs = {"what": "explain", "tokens": given.tokens, "blocks": len(request.block_hashes)}
    outputs |= {"explain_ms": 1e3 * median(explained), "hash_ms": 1e3 * median(hashing)}
    sys.stdout.write(json.dumps(outputs) + "\n")


if __name__ == "__main__":
    main()
