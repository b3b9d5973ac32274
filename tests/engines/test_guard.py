"""A pass rejects arguments that make its KV depend on more than its tokens."""

import gc
import inspect
import weakref
from contextlib import nullcontext

import pytest
import torch
from tinymodels import COMMON, agree, answer, serve, some
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CTRLConfig,
    CTRLLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from kvtrie.engines.transformers import KvtrieCache
from kvtrie.errors import ClosedError, ConfigError, KvtrieError

pytestmark = pytest.mark.engine

TOKENS = 24
IDS = some(1, 1, TOKENS)


def gpt2(**changes):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 211}
    config = GPT2Config(**sizes, initializer_range=0.15, dtype="float32", **changes)
    return GPT2LMHeadModel(config).eval()


def ctrl():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 32, "n_positions": 128}
    config = CTRLConfig(vocab_size=211, initializer_range=0.15, dtype="float32", **sizes)
    return CTRLLMHeadModel(config).eval()


def later_is_right(model, executor, ids=IDS):
    """A plain request sees what it would see without a cache."""
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
        with KvtrieCache(model, executor, ids) as cache:
            past = cache.get_seq_length()
            mine = model(ids[:, past:], past_key_values=cache).logits
    assert (mine - right[:, past:]).abs().max() < 1e-4
    executor.manager.audit()


def square(seen):
    return torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.float32).min)


def everything():
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool)


POSITIONS = torch.arange(TOKENS)[None]
ODD = {
    "position_ids": [
        POSITIONS + 3,
        POSITIONS.flip(1),
        POSITIONS[0, :5],
        torch.cat([POSITIONS[:, :-1], torch.tensor([[90]])], 1),
    ],
    "attention_mask": [
        square(everything()),
        square(everything().tril() & everything().triu(-4)),
        {"full_attention": square(everything())},
        torch.ones(1, TOKENS - 1),
        torch.ones(1, TOKENS + 1),
        (POSITIONS != 2).long(),
    ],
    "token_type_ids": [torch.full((1, TOKENS), 7)],
    "inputs_embeds": [torch.ones(1, TOKENS, 32)],
    "encoder_hidden_states": [torch.ones(1, 3, 32)],
    "encoder_attention_mask": [torch.zeros(1, 3)],
    "cache_position": [torch.arange(TOKENS) + 1],
    "head_mask": [torch.zeros(2, 4)],
    "cu_seq_lens_q": [torch.tensor([0, 5, TOKENS])],
    "is_causal": [False],
    "surprise": [1],
    "use_cache": [False, True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "return_dict": [False],
    "past_key_values": [None],
}


@pytest.mark.parametrize("make", [gpt2, ctrl, "llama"])
def test_any_keyword_of_forward_is_refused_or_a_later_request_is_right(make, llama):
    model = llama if make == "llama" else make()
    named = inspect.signature(model.base_model.forward).parameters
    assert set(named) - {"kwargs", "input_ids"} <= set(ODD)  # a new keyword wants an odd value
    accepted = []
    for name, values in ODD.items():
        for value in values:
            executor = serve(model)
            with torch.no_grad(), KvtrieCache(model, executor, IDS) as cache:
                given = {"input_ids": IDS, "past_key_values": cache} | {name: value}
                if name == "inputs_embeds":
                    given.pop("input_ids")
                try:
                    model.base_model(**given)
                    accepted.append(name)
                except ConfigError:
                    assert cache.leases[0].tokens == 0, "it was refused after the commit"
                except (TypeError, ValueError):  # the model refuses it itself
                    assert cache.leases[0].tokens == 0
            later_is_right(model, executor)
    assert set(accepted) <= {"use_cache", "return_dict", "past_key_values"} | {
        name for name in ODD if name.startswith("output_")
    }


@pytest.mark.parametrize("name", ["position_ids", "attention_mask", "token_type_ids"])
def test_keywords_by_place_are_looked_at_too(name):
    model = gpt2()
    executor = serve(model)
    with torch.no_grad(), KvtrieCache(model, executor, IDS) as cache:
        order = list(inspect.signature(model.base_model.forward).parameters)
        given = {"input_ids": IDS, "past_key_values": cache, name: ODD[name][0]}
        args = [given.get(each) for each in order[: max(map(order.index, given)) + 1]]
        with pytest.raises(ConfigError, match=name):
            model.base_model(*args)
    later_is_right(model, executor)


def padded():
    ids = torch.cat([torch.cat([torch.zeros(1, 9, dtype=torch.long), some(2, 1, 15)], 1), IDS])
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("lacking", ["attention_mask", "position_ids", "both", "none"])
def test_a_padded_batch_passes_its_mask_and_positions(llama, lacking):
    ids, mask, positions = padded()
    executor = serve(llama)
    given = {"attention_mask": mask, "position_ids": positions}
    for name in list(given) if lacking == "both" else [lacking]:
        given.pop(name, None)
    with torch.no_grad(), KvtrieCache(llama, executor, ids, attention_mask=mask) as cache:
        refused = pytest.raises(ConfigError, match=r"padding|padded")
        with nullcontext() if lacking == "none" else refused:
            llama(ids, past_key_values=cache, **given)
    later_is_right(llama, executor, ids[:1, 9:])
    later_is_right(llama, executor, ids[1:])


def test_positions_of_padding_do_not_count(llama):
    ids, mask, positions = padded()
    executor = serve(llama)
    with torch.no_grad(), KvtrieCache(llama, executor, ids, attention_mask=mask) as cache:
        far = positions.masked_fill(mask == 0, 1000)  # would stretch rotations that know lengths
        with pytest.raises(ConfigError, match="position_ids"):
            llama(ids, past_key_values=cache, attention_mask=mask, position_ids=far)
        ones = positions.masked_fill(mask == 0, 1)
        llama(ids, past_key_values=cache, attention_mask=mask, position_ids=ones)
    later_is_right(llama, executor, ids[:1, 9:])


@pytest.mark.parametrize("part", ["all", "one layer"])
def test_dropout_in_training_mode_is_refused(part):
    model = gpt2(attn_pdrop=0.5, resid_pdrop=0.5)
    executor = serve(model)
    trained = model if part == "all" else model.transformer.h[0]
    with torch.no_grad(), KvtrieCache(model, executor, IDS) as cache:
        trained.train()
        with pytest.raises(ConfigError, match=r"training mode.*eval\(\)"):
            model(IDS, past_key_values=cache)
        with pytest.raises(ConfigError, match="training mode"):
            KvtrieCache(model, executor, IDS)
        model.eval()
    assert executor.manager.stats().leases == 0
    later_is_right(model, executor)


@pytest.mark.parametrize("layer", ["all", "the last"])
def test_gradients_that_would_be_lost_are_refused(layer):
    model = gpt2()
    model.requires_grad_(layer == "all")
    model.transformer.h[1].attn.requires_grad_()
    executor = serve(model)
    with KvtrieCache(model, executor, IDS) as cache:
        with pytest.raises(ConfigError, match=r"gradient.*torch\.no_grad\(\)"):
            model(IDS, past_key_values=cache)
        assert cache.leases[0].tokens == 0
        assert not executor.pools[0].keys.requires_grad
    later_is_right(model, executor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_refused_on_opening_and_in_a_pass(llama, dtype):
    executor = serve(llama)
    with torch.no_grad(), KvtrieCache(llama, executor, IDS) as cache:
        with torch.autocast("cpu", dtype):
            with pytest.raises(ConfigError, match="autocast"):
                llama(IDS, past_key_values=cache)
            with pytest.raises(ConfigError, match="autocast"):
                KvtrieCache(llama, executor, IDS)
        assert cache.leases[0].tokens == 0
    later_is_right(llama, executor)


def test_a_model_that_became_another_type_is_refused():
    model = gpt2()
    executor = serve(model)
    with torch.no_grad(), KvtrieCache(model, executor, IDS) as cache:
        model.to(torch.bfloat16)
        with pytest.raises(ConfigError, match=r"torch\.bfloat16.*torch\.float32"):
            model(IDS, past_key_values=cache)
        model.to(torch.float32)


def test_a_pass_of_another_model_is_refused(llama):
    torch.manual_seed(5)
    other = LlamaForCausalLM(llama.config).eval()
    executor = serve(llama)
    with torch.no_grad(), KvtrieCache(llama, executor, IDS) as cache:
        with pytest.raises(ConfigError, match="the model that it was opened for"):
            other(IDS, past_key_values=cache)
        with pytest.raises(ConfigError, match="position_ids"):
            llama(IDS, past_key_values=cache, position_ids=POSITIONS + 1)
        with pytest.raises(ConfigError, match="the model that it was opened for"):
            other(IDS, past_key_values=cache)  # the tokens of a refused pass are not taken for its
    later_is_right(llama, executor)


@pytest.mark.parametrize("again", ["the prompt", "a shorter one", "a part", "all of it"])
def test_a_second_generate_on_answers_is_refused_or_right(llama, again):
    executor = serve(llama)
    ids = some(3, 1, 50)
    with KvtrieCache(llama, executor, ids) as cache:
        first = answer(llama, ids, cache, steps=6)
        second = {
            "the prompt": ids,
            "a shorter one": ids[:, :20],
            "a part": some(4, 1, 5),
            "all of it": torch.cat([first.sequences, some(5, 1, 4)], 1),
        }[again]
        if again == "all of it":
            agree(answer(llama, second), answer(llama, second, cache))
        else:
            cached = cache.leases[0].tokens
            with pytest.raises(ConfigError, match="the cache holds 55 columns, so pass"):
                answer(llama, second, cache)
            assert cache.leases[0].tokens == cached
    later_is_right(llama, executor, second)
    later_is_right(llama, executor, torch.cat([first.sequences, second], 1))


@pytest.mark.parametrize("how", ["by lookup", "by a model"])
def test_assisted_generation_works_on_a_warm_cache(llama, how):
    executor = serve(llama)
    ids = some(6, 1, 9).repeat(1, 5)
    helped = {"prompt_lookup_num_tokens": 4}
    if how == "by a model":
        torch.manual_seed(7)
        small = LlamaConfig(num_key_value_heads=2, **(COMMON | {"num_hidden_layers": 1}))
        helped = {"assistant_model": LlamaForCausalLM(small).eval()}
    truth = answer(llama, ids, steps=10)
    pasts = []
    for _ in range(2):
        with KvtrieCache(llama, executor, ids) as cache:
            pasts.append(cache.get_seq_length())
            agree(truth, answer(llama, ids, cache, steps=10, **helped))
    assert pasts == [0, 40]
    longer = torch.cat([truth.sequences, some(8, 1, 7)], 1)
    with KvtrieCache(llama, executor, ids) as cache:  # and on one that holds answers
        answer(llama, ids, cache, steps=10)
        agree(answer(llama, longer), answer(llama, longer, cache, **helped))
    executor.manager.audit()


def test_a_whole_pass_of_another_sequence_is_refused(llama):
    executor = serve(llama)
    other = IDS.clone()
    other[0, 11] = 1 + other[0, 11] % 200
    with torch.no_grad(), KvtrieCache(llama, executor, IDS) as cache:
        llama(IDS, past_key_values=cache)
        longer = torch.cat([other, some(9, 1, 3)], 1)
        with pytest.raises(ConfigError, match="from token 11 on"):
            llama(longer, past_key_values=cache, position_ids=torch.arange(TOKENS + 3)[None])
        with pytest.raises(ConfigError, match="position_ids"):
            llama(IDS, past_key_values=cache, position_ids=POSITIONS)  # nothing is left to compute
    later_is_right(llama, executor)


@pytest.mark.parametrize("opened", ["and left", "by beams", "in a cycle", "after a pass"])
def test_a_cache_that_is_dropped_holds_nothing(llama, opened):
    executor = serve(llama)
    hooks = len(llama.base_model._forward_pre_hooks)
    cache = KvtrieCache(llama, executor, IDS)
    if opened == "by beams":
        cache.batch_repeat_interleave(3)
    if opened == "in a cycle":
        cache.mine = cache
    if opened == "after a pass":
        answer(llama, IDS, cache)
    assert executor.manager.stats().leases > 0
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert executor.manager.stats().leases == 0
    assert len(llama.base_model._forward_pre_hooks) == hooks
    executor.manager.audit()


def test_a_pass_on_a_closed_cache_is_refused(llama):
    executor = serve(llama)
    cache = KvtrieCache(llama, executor, IDS)
    with torch.no_grad():
        llama(IDS, past_key_values=cache)
    cache.close()
    uses = [
        lambda: llama(IDS, past_key_values=cache),
        lambda: llama.generate(IDS, past_key_values=cache, max_new_tokens=2),
        cache.get_seq_length,
        lambda: cache.get_mask_sizes(1, 0),
        lambda: cache.crop(-1),
        cache.reset,
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0),
        lambda: cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 3),
    ]
    with torch.no_grad():
        for use in uses:
            with pytest.raises(ClosedError, match="closed"):
                use()
    assert len(cache) == len(llama.model.layers)
    assert "closed" in repr(cache)
    later_is_right(llama, executor)


def test_a_pass_after_the_manager_closed_is_refused(llama):
    executor = serve(llama)
    cache = KvtrieCache(llama, executor, IDS)
    executor.manager.close()
    with torch.no_grad(), pytest.raises(KvtrieError):
        llama(IDS, past_key_values=cache)
    cache.close()


@pytest.mark.parametrize("shape", [(0, 4), (1, 0), (4,)])
def test_no_prompt_is_refused(llama, shape):
    with pytest.raises(ConfigError, match="input_ids are"):
        KvtrieCache(llama, serve(llama), torch.zeros(shape, dtype=torch.long))


def test_what_cannot_be_placed_is_refused_on_opening():
    torch.manual_seed(0)
    mpt = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=211)).eval()
    with pytest.raises(ConfigError, match="MptModel takes no position_ids"):
        KvtrieCache(mpt, serve(mpt), IDS)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertLMHeadModel(BertConfig(vocab_size=211, intermediate_size=32, **sizes)).eval()
    with pytest.raises(ConfigError, match="sees later tokens"):
        KvtrieCache(bert, serve(bert), IDS)


def llama4():
    torch.manual_seed(0)
    config = Llama4TextConfig(
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=16,
        no_rope_layers=[1, 0] * 2,
        attn_temperature_tuning=True,
        floor_scale=32,
        attn_scale=2.0,
        **(COMMON | {"num_hidden_layers": 4}),
    )
    return Llama4ForCausalLM(config).eval()


def test_scales_by_column_are_right_or_refused():
    """Llama 4 scales queries by their place in the pass: neither padding nor holes fit that."""
    model = llama4()
    ids, mask, positions = padded()
    given = {"attention_mask": mask, "position_ids": positions}
    executor = serve(model)
    with torch.no_grad(), KvtrieCache(model, executor, ids, attention_mask=mask) as cache:
        model(ids, past_key_values=cache, **given)  # 24 columns, below the first step
    later_is_right(model, executor, ids[:1, 9:])
    long = some(10, 1, 70)
    wide = torch.cat([torch.zeros(1, 9, dtype=torch.long), long], 1)
    seen = (wide != 0).long()
    given = {"attention_mask": seen, "position_ids": (seen.cumsum(-1) - 1).clamp(min=0)}
    with (
        torch.no_grad(),
        KvtrieCache(model, executor, wide, attention_mask=seen) as cache,
        pytest.raises(ConfigError, match="takes no padding"),
    ):
        model(wide, past_key_values=cache, **given)
    for _ in range(2):
        later_is_right(model, executor, long)
    tight = serve(model, 10)  # another prompt evicts some of the first one's blocks
    for ids in (long, some(11, 1, 70)):
        later_is_right(model, tight, ids)
    with pytest.raises(ConfigError, match=r"no holes in a prompt of 70 tokens.*'leaf-only'"):
        KvtrieCache(model, tight, long)
    prefixes = serve(model, 10, structure="leaf-only")
    for ids in (long, some(11, 1, 70), long):
        later_is_right(model, prefixes, ids)
