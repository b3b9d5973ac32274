"""A prompt that comes again is found to its last border before the last token, on every tier."""

import pytest
import torch
from grouped_serving import BLOCK, ask, push, serve, some
from tinymodels import agree, answer

from kvtrie import BlockManager, Cost, ResumePoints, Tier
from kvtrie.demo.families import FAMILIES, family
from kvtrie.engines.transformers import KvtrieCache, fingerprint, model_shape
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

pytestmark = pytest.mark.engine

TIERS = {
    "gpu": {"gpu": 200, "points": 40},
    "host": {"gpu": 20, "host": 400, "points": 5},
    "disk": {"gpu": 20, "host": 10, "points": 5},
}
QUICK = {("qwen3-next", "host", 0), ("gemma-3", "host", 0), ("lfm2", "disk", 0)}
CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.deep)
    for cell in ((name, tier, more) for name in FAMILIES for tier in TIERS for more in (-1, 0, 1))
]


@pytest.mark.parametrize(("name", "tier", "more"), CELLS)
def test_from_the_second_repeat_on_all_whole_blocks_are_found(name, tier, more, tmp_path):
    model, tokens = family(name), 4 * BLOCK + more
    executor = serve(model, **TIERS[tier], disk=tmp_path if tier == "disk" else None)
    ids = some(60, 1, tokens)
    truth, _ = ask(model, executor, ids, steps=12)
    found = []
    for _ in range(6):
        if tier != "gpu":
            push(model, executor, 8 if tier == "disk" else 4)
        with KvtrieCache(model, executor, ids, reserve=12) as cache:
            found.append(cache.leases[0].matched)
            mine = answer(model, ids, cache, steps=12)
        assert mine.sequences.tolist() == truth.tolist()
    assert found[1:] == [(tokens - 1) // BLOCK * BLOCK] * 5, found
    stats = executor.manager.stats().tiers
    assert tier == "gpu" or stats[tier].promoted > 0
    executor.manager.audit()
    executor.close()


def test_a_prompt_of_full_blocks_resumes_at_its_end_and_a_block_before():
    model = family("qwen3-next")
    executor = serve(model, gpu=80)
    ids = some(61, 1, 4 * BLOCK)
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        assert cache.get_seq_length() == 3 * BLOCK
        agree(answer(model, ids, steps=1), answer(model, ids, cache, steps=1))
    longer = torch.cat([ids, some(62, 1, BLOCK)], dim=1)
    for prompt, border in ((ids, 3), (longer, 4)):
        with KvtrieCache(model, executor, prompt) as cache:
            assert cache.leases[0].matched == border * BLOCK
    executor.close()


def test_a_generation_does_not_run_out_of_what_was_reserved():
    model = family("qwen3-next")
    shape = model_shape(model, fingerprint=fingerprint(model))
    point = max(shape.block_bytes(BLOCK, group) for group in range(len(shape.groups)))
    served, refused = 0, []
    for pages in range(2, 8):
        tiers = [Tier("gpu", bytes=pages * point), Tier("host", bytes="1MB")]
        try:
            manager = BlockManager(
                shape,
                tiers,
                block_tokens=BLOCK,
                cost=Cost(ns_per_token=1e9),
                resume=ResumePoints(),
            )
        except ConfigError:
            continue  # less than a block and a point
        executor = Executor(manager, open_pools(shape, tiers, BLOCK, resume=ResumePoints()))
        for tokens in (31, 32):
            ids = some(tokens, 1, tokens)
            try:
                cache = KvtrieCache(model, executor, ids, reserve=20)
            except NoSpaceError as error:
                refused.append(error)
                continue
            with cache:
                answer(model, ids, cache, steps=20)
                served += 1
        manager.audit()
        executor.close()
    assert served >= 4
    assert len(refused) >= 2
    assert all(f"wanted {error.wanted} pages" in str(error) for error in refused)
    assert all(error.wanted > error.free for error in refused)
