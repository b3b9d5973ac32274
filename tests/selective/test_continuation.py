"""A second prompt over a cache that has read one is right or refused, in every way of calling."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from decoders import make
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, GenerationMixin
from transformers.masking_utils import create_causal_mask

from kvtrie import BlockManager, Cost, ModelShape, Tier
from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.selective import CacheSettings, SelectiveCache, generate
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

DENSE = CacheSettings("dense-default", cache_length=256, chunk_size=16)
HOW = {"do_sample": False, "max_new_tokens": 5}
READ = 34


def tokens(seed, rows, n):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(1, 40, (rows, n), generator=made)


def with_mask(ids, width=None):
    return {"attention_mask": torch.ones(len(ids), width or ids.shape[1], dtype=torch.int64)}


def plain(model, ids, **more):
    return model.generate(ids, **HOW | with_mask(ids) | more)


def logits(model, **given):
    with torch.no_grad():
        return model(**given).logits[:, -1]


def embeddings(model, ids):
    return model.get_input_embeddings()(ids)


def alone(model, cache, ids):
    """The logits after what the cache has read and `ids`, without a cache."""
    return logits(model, input_ids=torch.cat([cache.was, ids], dim=1))


# Name: the call, and its result without a cache. Passes append what they are given.
GENERATES = {
    "generate": lambda m, c, x: m.generate(x, past_key_values=c, **HOW),
    "generate with input_ids": lambda m, c, x: m.generate(input_ids=x, past_key_values=c, **HOW),
    "generate with inputs": lambda m, c, x: m.generate(inputs=x, past_key_values=c, **HOW),
    "generate with a mask": lambda m, c, x: m.generate(x, past_key_values=c, **HOW, **with_mask(x)),
    "generate in chunks": lambda m, c, x: m.generate(
        x, past_key_values=c, prefill_chunk_size=7, **HOW
    ),
    "generate of one token": lambda m, c, x: m.generate(
        x, past_key_values=c, **HOW | {"max_new_tokens": 1}
    ),
    "generate by a configuration": lambda m, c, x: m.generate(
        x, GenerationConfig(**HOW, pad_token_id=0), past_key_values=c
    ),
    "generate of the class": lambda m, c, x: type(m).generate(m, x, past_key_values=c, **HOW),
    "generate of the base": lambda m, c, x: GenerationMixin.generate(
        m, x, past_key_values=c, **HOW
    ),
    "generate with beams": lambda m, c, x: m.generate(x, past_key_values=c, num_beams=2, **HOW),
}
REFUSED = {
    "generate of embeddings": lambda m, c, x: m.generate(
        inputs_embeds=embeddings(m, x), past_key_values=c, **HOW
    ),
    "generate of nothing": lambda m, c, _: m.generate(past_key_values=c, **HOW),
    "a pass with positions from 0": lambda m, c, x: logits(
        m, input_ids=x, past_key_values=c, position_ids=torch.arange(x.shape[1])[None]
    ),
    "a pass with columns from 0": lambda m, c, x: logits(
        m, input_ids=x, past_key_values=c, cache_position=torch.arange(x.shape[1])
    ),
    "a pass with a mask of its own": lambda m, c, x: logits(
        m, input_ids=x, past_key_values=c, **with_mask(x)
    ),
    "embeddings with a mask of their own": lambda m, c, x: logits(
        m, inputs_embeds=embeddings(m, x), past_key_values=c, **with_mask(x)
    ),
    "kvtrie's generate with a cache": lambda m, c, x: generate(m, x, DENSE, past_key_values=c),
}
APPENDS = {
    "a pass": lambda m, c, x: logits(m, input_ids=x, past_key_values=c),
    "a pass with the positions that follow": lambda m, c, x: logits(
        m,
        input_ids=x,
        past_key_values=c,
        position_ids=torch.arange(READ, READ + x.shape[1])[None],
    ),
    "a pass with the whole mask": lambda m, c, x: logits(
        m, input_ids=x, past_key_values=c, **with_mask(x, READ + x.shape[1])
    ),
    "embeddings": lambda m, c, x: logits(m, inputs_embeds=embeddings(m, x), past_key_values=c),
    "read": lambda _, c, x: c.read(x),
    "chunk by chunk": lambda m, c, x: [
        logits(m, input_ids=part, past_key_values=c) for part in x.split(5, dim=1)
    ][-1],
    "generate of new tokens only": lambda m, c, x: m.generate(
        x,
        past_key_values=c,
        return_dict_in_generate=True,
        output_logits=True,
        **HOW,
        **with_mask(x, READ + x.shape[1]),
    ).logits[0],
}


@pytest.fixture(scope="module")
def llama():
    return make(max_position_embeddings=512)


def used(model, ids=None):
    """A cache over which the model has generated from a prompt of 30 tokens."""
    cache = SelectiveCache(model, DENSE)
    ids = tokens(1, 1, 30) if ids is None else ids
    cache.was = model.generate(ids, past_key_values=cache, **HOW)[:, :-1]
    assert cache.get_seq_length() == READ
    return cache


def prompts(cache):
    rest = tokens(5, 1, 9)
    return {
        "the same": tokens(1, 1, 30),
        "another": tokens(9, 1, 50),
        "a shorter one": tokens(3, 1, 12),
        "as many tokens": tokens(4, 1, READ),
        "one token more": tokens(4, 1, READ + 1),
        "one other token": torch.cat([cache.was[:, :-1], rest], dim=1),
    }


@pytest.mark.parametrize("way", [*GENERATES, *REFUSED])
def test_a_prompt_that_does_not_continue_the_cache_is_refused(llama, way):
    with used(llama) as cache:
        for ids in prompts(cache).values():
            with pytest.raises(KvtrieError):
                (GENERATES | REFUSED)[way](llama, cache, ids)
            assert cache.get_seq_length() == READ
        more = torch.cat([cache.was, tokens(6, 1, 3)], dim=1)
        assert torch.equal(llama.generate(more, past_key_values=cache, **HOW), plain(llama, more))


@pytest.mark.parametrize("way", GENERATES)
def test_a_prompt_that_continues_the_cache_is_right(llama, way):
    call = GENERATES[way]
    with used(llama) as cache:
        ids = torch.cat([cache.was, tokens(6, 1, 9)], dim=1)
        truth = call(llama, None, ids)
        assert torch.equal(call(llama, cache, ids), truth)


@pytest.mark.parametrize("way", APPENDS)
def test_a_pass_appends_what_it_is_given(llama, way):
    with used(llama) as cache:
        ids = tokens(9, 1, 12)
        truth = alone(llama, cache, ids)
        assert (APPENDS[way](llama, cache, ids) - truth).abs().max() < 1e-4


def test_embeddings_are_tokens_that_no_prompt_is_compared_with(llama):
    ids = tokens(2, 1, 12)
    with SelectiveCache(llama, DENSE) as cache:
        logits(llama, inputs_embeds=embeddings(llama, ids), past_key_values=cache)
        with pytest.raises(ConfigError, match="12 tokens, not all of which are known"):
            llama.generate(torch.cat([ids, tokens(3, 1, 4)], dim=1), past_key_values=cache, **HOW)


def test_what_was_reset_or_cropped_is_no_part_of_the_comparison(llama):
    other = tokens(9, 1, 50)
    with used(llama) as cache:
        cache.crop(-20)
        kept = torch.cat([cache.was[:, :14], tokens(7, 1, 8)], dim=1)
        with pytest.raises(ConfigError, match="from token 0 of 14 on"):
            llama.generate(other, past_key_values=cache, **HOW)
        assert torch.equal(llama.generate(kept, past_key_values=cache, **HOW), plain(llama, kept))
        cache.crop(-cache.get_seq_length())
        assert torch.equal(llama.generate(other, past_key_values=cache, **HOW), plain(llama, other))
        cache.reset()
        assert torch.equal(llama.generate(kept, past_key_values=cache, **HOW), plain(llama, kept))


def parked(model, cache):
    shape = ModelShape.from_config(model.config, fingerprint="llama")
    tiers = [Tier("gpu", blocks=64), Tier("host", blocks=64)]
    manager = BlockManager(shape, tiers, block_tokens=8, cost=Cost(ns_per_token=1e9))
    executor = Executor(manager, open_pools(shape, tiers, 8), workers=0)
    return cache.park(executor).resume(model)


@pytest.mark.parametrize("kind", ["copied", "parked"])
def test_a_copy_knows_what_was_read(llama, kind):
    with used(llama) as cache:
        was = cache.was
        other = copy.deepcopy(cache) if kind == "copied" else parked(llama, cache)
    with other:
        with pytest.raises(ConfigError, match="from token 0 of 34 on"):
            llama.generate(tokens(9, 1, 50), past_key_values=other, **HOW)
        ids = torch.cat([was, tokens(6, 1, 3)], dim=1)
        assert torch.equal(llama.generate(ids, past_key_values=other, **HOW), plain(llama, ids))


def test_rows_of_a_padded_batch_are_compared_from_their_first_token(llama):
    ids = tokens(11, 2, 20)
    mask = (torch.arange(20) >= torch.tensor([[6], [0]])).long()
    with SelectiveCache(llama, DENSE, 2) as cache:
        first = llama.generate(ids, attention_mask=mask, past_key_values=cache, **HOW)
        more = torch.cat([first, tokens(12, 2, 4)], dim=1)
        wide = torch.cat([mask, torch.ones(2, 9, dtype=torch.int64)], dim=1)
        call = partial(llama.generate, attention_mask=wide, past_key_values=cache, **HOW)
        with pytest.raises(ConfigError, match="row 0 of the prompt"):
            call(more.flip(0))
        other = more.clone()
        other[1, 0] += 1
        with pytest.raises(
            ConfigError, match=r"row 1 of the prompt is another sequence.* token 0 "
        ):
            call(other)
        with pytest.raises(ConfigError, match="3 rows does not continue 2 rows"):
            llama.generate(more[[0, 1, 0]], past_key_values=cache, **HOW)
        more[0, :6] = 7  # padding, which nothing sees
        assert torch.equal(call(more), llama.generate(more, attention_mask=wide, **HOW))


def test_rows_that_were_selected_are_compared_as_they_are_now(llama):
    ids = tokens(13, 3, 20)
    with SelectiveCache(llama, DENSE, 3) as cache:
        cache.read(ids)
        cache.batch_select_indices(torch.tensor([2, 0]))
        more = torch.cat([ids, tokens(14, 3, 2)], dim=1)
        with pytest.raises(ConfigError, match="row 0 of the prompt"):
            llama.generate(more[:2], past_key_values=cache, **HOW)
        mine = llama.generate(more[[2, 0]], past_key_values=cache, **HOW)
        assert torch.equal(mine, plain(llama, more[[2, 0]]))


def test_generate_of_a_wrapper_is_compared_too():
    model = get_peft_model(
        make(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    ids = tokens(1, 1, 20)
    with SelectiveCache(model.eval(), DENSE) as cache:
        for called in (model, model.base_model.model):
            cache.reset()
            called.generate(input_ids=ids, past_key_values=cache, **HOW)
            with pytest.raises(ConfigError, match="from token 0 of 24 on"):
                called.generate(input_ids=tokens(9, 1, 50), past_key_values=cache, **HOW)


def test_generate_is_as_it_was_when_the_last_cache_is_closed(llama):
    usual, name = GenerationMixin.generate, fingerprint(llama)
    first, second = SelectiveCache(llama, DENSE), SelectiveCache(llama, DENSE)
    first.close()
    assert GenerationMixin.generate is not usual
    assert fingerprint(llama) == name
    del second
    assert GenerationMixin.generate is usual
    assert "generate" not in vars(type(llama)) | vars(llama)


def test_a_plain_pass_that_finds_another_threads_settings_is_refused(llama, monkeypatch):
    """A mask that is made meanwhile would be none, whatever attention it is used in later."""
    given = {"inputs_embeds": torch.zeros(1, 9, 64), "attention_mask": None}
    mask = partial(create_causal_mask, llama.config, past_key_values=None, **given)
    with SelectiveCache(llama, DENSE) as cache, ThreadPoolExecutor(1) as other:
        inner, refused = cache.caches[0].forward, []

        def forward(*args):
            for call in (mask, partial(logits, llama, input_ids=tokens(2, 1, 9))):
                with pytest.raises(ConfigError, match="another thread runs this model"):
                    other.submit(call).result()
                refused.append(call)
            return inner(*args)

        monkeypatch.setattr(cache.caches[0], "forward", forward)
        cache.read(tokens(1, 1, 12))
    assert len(refused) == 2
