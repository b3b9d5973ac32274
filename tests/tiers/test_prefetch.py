"""Prefetch: blocks of a shared store come to host memory before a request needs them."""

import numpy as np
import pytest
from test_folder_store import PROMPT, SHAPE, SIZE, compute, world

from kvtrie import BlockManager, ConfigError, Tier
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor


def test_prefetch_without_a_store_finds_nothing():
    tiers = [Tier("gpu", blocks=8), Tier("host", blocks=8)]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    with Executor(manager, open_pools(SHAPE, tiers, SIZE)) as executor:
        assert executor.prefetch(PROMPT, deadline_s=1.0) == (0, 0, 0, 0)
        for bad in (0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match="deadline_s"):
                executor.prefetch(PROMPT, deadline_s=bad)


def test_a_prompt_larger_than_a_quarter_of_host_is_brought_in_steps(tmp_path):
    url = f"folder:{tmp_path}/kv"
    prompt = list(range(32 * SIZE))
    with world(url, gpu=40, host=40) as executor:
        compute(executor, prompt)
    with world(url, gpu=40, host=40) as executor:
        found = executor.prefetch(np.array(prompt), deadline_s=30.0)
        assert found.found == 32
        executor.drain()
        match = executor.manager.lookup(prompt, now=executor.clock(), keep=0)
        assert match.resident("host") == 32
