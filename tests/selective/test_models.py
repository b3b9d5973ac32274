"""Selective caches under transformers' own models: what they say, and what they leave alone.

One file beyond 600 lines: all of it runs the same few models and their fixtures.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading

import pytest
import torch
import transformers
from decoders import CODED, KINDS, POLICIES, make
from sight import dense, watch

from kvtrie.errors import ClosedError, ConfigError
from kvtrie.selective import CacheSettings, SelectiveCache, generate
from kvtrie.selective.buffers import CodedBuffers
from kvtrie.selective.names import BUFFERS


@pytest.fixture(scope="module")
def llama():
    return make()


def tokens(seed, *shape):
    return torch.randint(1, 211, shape, generator=torch.Generator().manual_seed(seed))


def passes(model, cache, ids, draw, mask=None):
    """Logits of all tokens, read in passes of any allowed length."""
    logits = []
    columns = None if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
    while (at := cache.get_seq_length()) < ids.shape[1]:
        new = min(ids.shape[1] - at, draw.randint(1, cache.largest_step))
        given = {}
        if mask is not None:
            given = {
                "attention_mask": mask[:, : at + new],
                "position_ids": columns[:, at : at + new],
            }
        with torch.no_grad():
            out = model(ids[:, at : at + new], past_key_values=cache, **given)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def equal_under_masks(
    model, policy, seed, *, buffers="default", padded=False, layer=0, **arguments
):
    """A read in drawn passes and one dense pass under what each query saw: the same logits."""
    ids = tokens(seed, 2, 50)
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
    settings = CacheSettings(f"{policy}-{buffers}", cache_length=14, cache_kwargs=arguments)
    with SelectiveCache(model, settings, 2) as cache:
        seen = watch(cache, ids.shape[1])
        mine = passes(model, cache, ids, random.Random(seed), mask)
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    truth = dense(model, ids, seen, positions)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    assert (mine - truth)[real].abs().max() < 1e-4
    hidden = ~seen[layer].masks[-1][0, 0, -1]
    assert hidden.any()  # so the mask is not the causal one


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_a_mask(llama, policy):
    equal_under_masks(llama, policy, 1)


@pytest.mark.parametrize(
    ("policy", "buffers", "arguments"),
    [
        ("qh2o", "torch-quantized8", {"grace_period": 3}),
        ("qh2o-vlen", "torch-quantized4", {"sinks": 2}),
        ("qh2o", "int8", {}),
        ("qh2o-vlen", "fp8", {"grace_period": 2, "normalize_scores": True}),
        ("mix-snapkv+keydiff", "torch-quantized8", {"grace_period": 3}),
    ],
)
def test_a_policy_over_codes_is_a_mask_over_what_codes_say(llama, policy, buffers, arguments):
    """New rows are exact within their step, and what their codes say from then on."""
    equal_under_masks(llama, policy, 1, buffers=buffers, **arguments)
    equal_under_masks(llama, policy, 2, buffers=buffers, padded=True, **arguments)


@pytest.mark.parametrize("defect", ["always coded", "always exact"])
def test_when_rows_become_what_codes_say_is_seen(llama, monkeypatch, defect):
    """A cache that lets a step see its own codes, or a later one what was exact."""
    write = CodedBuffers.write

    def coded(self, rows, keys, values):
        write(self, rows, self.rounded(keys), self.rounded(values))

    if defect == "always coded":
        monkeypatch.setattr(CodedBuffers, "write", coded)
    else:
        monkeypatch.setattr(CodedBuffers, "settle", lambda _: None)
    with pytest.raises(AssertionError):
        equal_under_masks(llama, "qh2o", 1, buffers="torch-quantized4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_policy_is_a_mask_under_other_models(kind, kv_heads):
    equal_under_masks(make(kind, kv_heads), "h2o", 2, grace_period=3)


def test_three_query_heads_of_a_group():
    model = make(num_attention_heads=6, hidden_size=96)
    equal_under_masks(model, "snapkv", 5, grace_period=3)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "h2o-orig"])
def test_padding_is_never_seen(llama, policy):
    arguments = {"sinks": 2} if policy == "lastrec" else {"grace_period": 3, "sinks": 2}
    equal_under_masks(llama, policy, 3, padded=True, **arguments)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_policy_is_a_mask(kind, kv_heads):
    models = [make(kind, kv_heads)]
    if kv_heads == 2:  # groups of three query heads
        models.append(make(kind, kv_heads, num_attention_heads=6, hidden_size=96))
    names = [(policy, "default") for policy in POLICIES]
    names += [(policy, buffers) for policy in (*CODED, "h2o", "keydiff") for buffers in BUFFERS[1:]]
    for model, (policy, buffers), seed in itertools.product(models, names, range(3)):
        padded = policy != "h2o-orig" and seed == 2
        equal_under_masks(model, policy, seed, buffers=buffers, padded=padded)


@pytest.mark.parametrize("policy", ["dense", *POLICIES])
def test_as_many_rows_as_tokens_are_exact(llama, policy):
    ids = tokens(4, 2, 40)
    with torch.no_grad():
        truth = llama(ids).logits
    settings = CacheSettings(f"{policy}-default", cache_length=40)
    with SelectiveCache(llama, settings, 2) as cache:
        mine = passes(llama, cache, ids, random.Random(policy))
    assert (mine - truth).abs().max() < 1e-4


def answer(model, ids, **more):
    more = {"max_new_tokens": 8, "do_sample": False} | more
    more.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **more)


@pytest.mark.parametrize(
    "more", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}]
)
def test_generate_says_what_the_model_says(llama, more):
    ids = tokens(5, 2, 30)
    settings = CacheSettings("h2o-default", cache_length=64)
    mine = generate(llama, ids, settings, max_new_tokens=8, do_sample=False, **more)
    assert torch.equal(mine, answer(llama, ids, **more))


def test_generate_takes_padded_batches(llama):
    ids = tokens(6, 2, 30)
    ids[0, :9] = 0
    mask = (torch.arange(30) >= torch.tensor([[9], [0]])).long()
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    settings = CacheSettings("snapkv-default", cache_length=64)
    assert torch.equal(generate(llama, ids, settings, **given), answer(llama, ids, **given))
    short = generate(llama, ids, CacheSettings("h2o-default", cache_length=16), **given)
    assert short.shape == (2, 36)


def test_a_long_prompt_with_beams_goes_on(llama):
    ids = tokens(7, 1, 200)
    settings = CacheSettings("h2o-int8", cache_length=32, chunk_size=16)
    assert generate(llama, ids, settings, max_new_tokens=5, num_beams=3).shape == (1, 205)


def test_other_passes_are_what_they_were(llama):
    ids, other = tokens(8, 1, 60), tokens(9, 1, 30)
    with torch.no_grad():
        before = llama(other).logits
    hooks = len(llama.model._forward_pre_hooks)
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20)) as cache:
        cache.read(ids[:, :40])
        with torch.no_grad():
            assert torch.equal(llama(other).logits, before)
        assert torch.equal(answer(llama, other), answer(llama, other))
        cache.read(ids[:, 40:])
        assert torch.is_grad_enabled()
    assert llama.config._attn_implementation == "sdpa"
    assert len(llama.model._forward_pre_hooks) == hooks
    with pytest.raises(ClosedError):
        cache.read(ids)
    out = llama(other)  # gradients flow where no selective cache is
    assert out.logits.requires_grad


def test_a_pass_that_fails_leaves_the_model_alone(llama, monkeypatch):
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20)) as cache:

        def fail(*_):
            raise MemoryError

        cache.read(tokens(1, 1, 5))
        monkeypatch.setattr(cache.caches[1], "forward", fail)
        with pytest.raises(MemoryError):
            cache.read(tokens(2, 1, 5))
        assert llama.config._attn_implementation == "sdpa"
        with pytest.raises(ClosedError, match="ended midway"):
            cache.read(tokens(2, 1, 5))
        monkeypatch.undo()
        cache.reset()
        assert cache.read(tokens(1, 1, 5)).isfinite().all()


def test_a_cache_that_is_dropped_leaves_the_model(llama):
    hooks = len(llama.model._forward_pre_hooks)
    cache = SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20))
    assert len(llama.model._forward_pre_hooks) == hooks + 1
    del cache
    assert len(llama.model._forward_pre_hooks) == hooks


def test_yarn_is_what_a_model_set_to_it_computes():
    model, scaled = (
        make(max_position_embeddings=64),
        make(
            max_position_embeddings=64,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 200 / 64,
                "original_max_position_embeddings": 64,
            },
        ),
    )
    ids = tokens(10, 1, 200)
    with torch.no_grad():
        truth, static = scaled(ids).logits[:, -1], model(ids).logits[:, -1]
    settings = CacheSettings("dense-default", cache_length=200)
    with SelectiveCache(model, settings) as cache:
        assert cache.steps(200) == [200]
        assert cache.rope_factor == 200 / 64
        assert (cache.read(ids[:, :150]) - truth).abs().max() > 1e-2
        assert (cache.read(ids[:, 150:]) - truth).abs().max() < 1e-4
    with SelectiveCache(model, settings, yarn_rope=False) as cache:
        assert (cache.read(ids) - static).abs().max() < 1e-4
    with SelectiveCache(scaled, settings) as cache:  # the model's scaling stays
        assert (cache.read(ids) - truth).abs().max() < 1e-4
    with torch.no_grad():
        assert torch.equal(model(ids).logits[:, -1], static)


def test_steps_end_where_each_layer_is_full(llama):
    settings = CacheSettings("h2o-default", cache_length=(24, 16, 40), chunk_size=10)
    with SelectiveCache(llama, settings) as cache:
        steps = cache.steps(75)
        assert steps == [16, 8, 10, 6, 10, 10, 10, 5]
        assert cache.read(tokens(11, 1, 75)).isfinite().all()
        assert [layer.filled for layer in cache.caches] == [24, 16, 40]


def test_drawn_steps_have_five_sizes_around_the_one_given(llama):
    settings = CacheSettings(
        "h2o-default", cache_length=100, chunk_size=20, randomize_chunk_sizes=True, seed=3
    )
    with SelectiveCache(llama, settings) as cache:
        steps = cache.steps(6000)
        assert steps == cache.steps(6000)
    sizes = set(steps[1:-1])
    assert len(sizes) == 5
    assert min(sizes) >= 10
    assert max(sizes) <= 30
    other = CacheSettings(
        "h2o-default", cache_length=100, chunk_size=20, randomize_chunk_sizes=True, seed=4
    )
    with SelectiveCache(llama, other) as cache:
        assert cache.steps(6000) != steps


@pytest.mark.parametrize("buffers", ["default", "torch-quantized8", "int8"])
def test_memory_does_not_grow(llama, buffers):
    settings = CacheSettings(f"h2o-{buffers}", cache_length=32, chunk_size=16)
    sizes = []
    with SelectiveCache(llama, settings) as cache:
        for _ in range(2):
            cache.read(tokens(12, 1, 200))
            sizes.append(sum(layer.buffers.nbytes for layer in cache.caches))
            assert all(layer.token_pos.shape[2] == 32 for layer in cache.caches)
    assert sizes[0] == sizes[1]


def test_buffers_have_the_models_precision():
    model = make().to(torch.bfloat16)
    for name in ("h2o-default", "h2o-torch-quantized8"):
        with SelectiveCache(model, CacheSettings(name, cache_length=16)) as cache:
            assert cache.read(tokens(13, 1, 40)).dtype == torch.bfloat16
            assert cache.caches[0].keys_values()[0].dtype == torch.bfloat16
            assert cache.caches[0].scores.dtype == torch.float32


def test_a_shrunk_model_cache_goes_on(llama):
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=32)) as cache:
        cache.read(tokens(14, 1, 50))
        cache.shrink(20)
        cache.read(tokens(15, 1, 30))
        assert {layer.filled for layer in cache.caches} == {20}
        with pytest.raises(ConfigError, match="cannot shrink 20 rows to 21"):
            cache.shrink(21)
        assert cache.get_seq_length() == 80


def test_crops_are_exact_or_refused(llama):
    ids = tokens(16, 1, 30)
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=32)) as cache:
        cache.read(ids[:, :20])
        assert cache.is_croppable
        cache.crop(-5)
        with torch.no_grad():
            truth = llama(ids).logits[:, -1]
        assert (cache.read(ids[:, 15:]) - truth).abs().max() < 1e-4
        cache.read(tokens(17, 1, 8))
        assert not cache.is_croppable
        with pytest.raises(ConfigError, match="cannot crop by 2 of 38 tokens"):
            cache.crop(-2)


def test_rows_of_a_batch_are_selected(llama):
    ids = tokens(18, 3, 40)
    settings = CacheSettings("h2o-torch-quantized8", cache_length=16)
    with SelectiveCache(llama, settings, 3) as cache, SelectiveCache(llama, settings) as alone:
        cache.read(ids)
        alone.read(ids[2:])
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.reorder_cache(torch.tensor([0, 0]))
        more = tokens(19, 1, 5)
        both, one = cache.read(more.expand(2, 5)), alone.read(more)
    assert (both - one).abs().max() < 1e-4


def opened(model, name="h2o-default", **more):
    return SelectiveCache(model, CacheSettings(name, **{"cache_length": 16, **more}))


def again(model, ids=None, *, name="h2o-default", cache_length=16, **given):
    """A pass after five tokens that a cache has read."""
    with opened(model, name, cache_length=cache_length) as cache, torch.no_grad():
        cache.read(tokens(2, 1, 5))
        return model(tokens(1, 1, 6) if ids is None else ids, past_key_values=cache, **given)


def embedded(model):
    """A pass over embeddings that ask for gradients."""
    given = torch.zeros(1, 4, 64, requires_grad=True)
    with opened(model) as cache:
        return model(inputs_embeds=given, past_key_values=cache)


def lookup(model, **given):
    """transformers' own generate over a cache that has read all but the last token."""
    ids = tokens(3, 1, 10)
    with opened(model, cache_length=64) as cache:
        cache.read(ids[:, :-1])
        return model.generate(ids, past_key_values=cache, max_new_tokens=4, **given)


REFUSED = {
    "a long prompt in the model's own generate": (
        lambda m: m.generate(tokens(1, 1, 40), past_key_values=opened(m), max_new_tokens=2),
        "let kvtrie.selective.generate or SelectiveCache.read cut it",
    ),
    "lengths of fewer layers": (
        lambda m: opened(m, cache_length=(8, 8)),
        "2 cache lengths for a model of 3 layers",
    ),
    "a batch of others": (
        lambda m: SelectiveCache(m, CacheSettings("h2o-default", cache_length=8), 2).read(
            tokens(1, 3, 4)
        ),
        "a batch of 3 for a SelectiveCache of 2 rows: open one with batch=3",
    ),
    "a mask with holes": (
        lambda m: opened(m).read(tokens(1, 1, 4), torch.tensor([[1, 0, 1, 1]])),
        "pad on the left",
    ),
    "heads too small for codes": (
        lambda _: opened(make(num_attention_heads=8), "h2o-torch-quantized8"),
        "heads of 8 numbers are too small",
    ),
    "a sequence beyond dense": (
        lambda m: opened(m, "dense-default").steps(17),
        "a sequence of 17 tokens is longer than the 16 rows",
    ),
    "steps of no number": (lambda m: opened(m).steps("x"), "total is 'x', a whole number"),
    "rows of no number": (lambda m: opened(m).shrink([8, 8, "x"]), "cache_length is 'x'"),
    "rows of fewer layers": (lambda m: opened(m).shrink([8, 8]), "2 cache lengths for 3 layers"),
    "a crop ahead": (lambda m: opened(m).crop(2), "cannot crop by 2: a number below 0"),
    "settings of no class": (lambda m: SelectiveCache(m, "h2o"), "settings is 'h2o'"),
    "an executor that is none": (lambda m: opened(m).park(None), "executor is None"),
    "tokens in a list": (lambda m: opened(m).read([1, 2]), r"input_ids is \[1, 2\]"),
    "a sequence in a list": (
        lambda m: generate(m, [1, 2], CacheSettings(cache_length=8)),
        r"input_ids is \[1, 2\]",
    ),
    "no tokens": (lambda m: opened(m).read(tokens(1, 1, 0)), r"input_ids are \(1, 0\)"),
    "a mask of fewer columns": (
        lambda m: opened(m).read(tokens(1, 1, 9), torch.ones(1, 4)),
        r"attention_mask is \(1, 4\), \(1, 9\) wanted",
    ),
    "an argument of no policy": (
        lambda m: opened(m, cache_kwargs={"working": 1}),
        "no policy takes working",
    ),
    "generate without a cache": (
        lambda m: generate(m, tokens(1, 1, 4), CacheSettings(cache_length=8), use_cache=False),
        "leave use_cache out",
    ),
    "an answer beyond dense": (
        lambda m: generate(
            m, tokens(1, 1, 30), CacheSettings("dense-default", 32), max_new_tokens=9
        ),
        "a sequence of 39 tokens is longer than the 32 rows",
    ),
    "a pass from the start": (
        lambda m: again(m, tokens(1, 1, 4), position_ids=torch.arange(4)[None]),
        "position_ids say 0 at token 5",
    ),
    "a prompt that repeats what was read": (
        lambda m: again(m, tokens(1, 1, 9), position_ids=torch.arange(9)[None]),
        "a pass of 9 tokens from position 0 on, and this cache has read 5",
    ),
    "gradients": (
        lambda m: m(tokens(1, 1, 4), past_key_values=opened(m)),
        "carry no gradient.*torch.no_grad",
    ),
    "gradients of embeddings": (
        lambda _: embedded(make().requires_grad_(requires_grad=False)),
        "carry no gradient",
    ),
    "training mode": (lambda _: again(make().train()), "model is in training mode"),
    "a dense cache that is full": (
        lambda m: again(m, tokens(1, 1, 1), name="dense-default", cache_length=5),
        "a sequence of 6 tokens is longer than the 5 rows of a dense cache",
    ),
    "prompt lookup": (
        lambda m: generate(
            m, tokens(1, 1, 9), CacheSettings(cache_length=64), prompt_lookup_num_tokens=3
        ),
        "leave prompt_lookup_num_tokens out",
    ),
    "an assistant": (
        lambda m: generate(m, tokens(1, 1, 9), CacheSettings(cache_length=64), assistant_model=m),
        "leave assistant_model out",
    ),
    "prompt lookup over an open cache": (
        lambda m: lookup(m, prompt_lookup_num_tokens=3),
        "a pass of 10 tokens from position 0 on, and this cache has read 9",
    ),
    "an uncached generate over an open cache": (
        lambda m: lookup(m, use_cache=False),
        "a pass of 11 tokens from position 0 on, and this cache has read 10",
    ),
    "a mask of another prompt": (
        lambda m: generate(
            m, tokens(1, 1, 9), CacheSettings(cache_length=64), attention_mask=torch.ones(1, 12)
        ),
        r"attention_mask is \(1, 12\), input_ids \(1, 9\)",
    ),
    "a cache for generate": (
        lambda m: generate(
            m, tokens(1, 1, 4), CacheSettings(cache_length=8), past_key_values=object()
        ),
        "leave past_key_values out",
    ),
}


ONE = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "Llama4",
            {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8},
            "layers of kind chunked",
        ),
        ("Mamba", {}, "MambaForCausalLM is no decoder that selective caches take"),
        (
            "DeepseekV3",
            {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 8},
            "DeepseekV3Model does not run over a selective cache: queries",
        ),
        ("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 32}, "OPTDecoder has no rotary_emb"),
    ],
)
def test_decoders_of_other_kinds_are_refused(kind, more, message):
    of_text = getattr(transformers, f"{kind}TextConfig", None)
    config = (of_text or getattr(transformers, f"{kind}Config"))(**ONE | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with pytest.raises(ConfigError, match=message):
        opened(model)
    assert not model.get_decoder()._forward_pre_hooks


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(llama, what):
    call, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        call(llama)
    assert llama.config._attn_implementation == "sdpa"


def test_generate_is_right_whatever_a_configuration_says_of_caches():
    model, ids = make(), tokens(5, 1, 30)
    truth = answer(model, ids)
    model.generation_config.use_cache = False
    settings = CacheSettings("dense-default", cache_length=64, chunk_size=8)
    given = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(generate(model, ids, settings, **given), truth)
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ConfigError, match="leave prompt_lookup_num_tokens out"):
        generate(model, ids, settings, **given)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("Doge", {"keep_window_size": 16}, "DogeAttention builds its own mask"),
        ("Doge", {"keep_window_size": 2048}, "DogeAttention builds its own mask"),
        ("DiffLlama", {}, "DiffLlama.*"),
    ],
)
def test_attention_that_is_more_than_a_causal_softmax_is_refused(kind, more, message):
    config = getattr(transformers, f"{kind}Config")(**ONE | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with pytest.raises(ConfigError, match=message):
        opened(model)
    assert model.config._attn_implementation != "kvtrie"
    assert not model.get_decoder()._forward_pre_hooks


def test_a_layer_that_attends_otherwise_is_seen_at_opening(monkeypatch):
    """One that scales what attention gives, whichever way its attention is called."""
    model = make()
    layer = model.model.layers[2].self_attn
    forward = type(layer).forward

    def louder(self, *given, **more):
        out, weights = forward(self, *given, **more)
        return (out * 1.5 if more.get("past_key_values") is not None else out), weights

    monkeypatch.setattr(layer, "forward", louder.__get__(layer))
    with pytest.raises(ConfigError, match="more than a causal softmax"):
        opened(model)
    monkeypatch.undo()
    opened(model).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference_in_attention(dtype):
    opened(make(num_hidden_layers=8).to(dtype)).close()


def test_threads_on_one_model_wait_for_one_another(llama):
    settings = CacheSettings("h2o-default", cache_length=20)
    ids = [tokens(seed, 1, 40) for seed in range(2)]
    truth = []
    for each in ids:
        with SelectiveCache(llama, settings) as cache:
            truth.append(cache.read(each))
    found, inside, waits = {}, threading.Event(), threading.Event()

    def first():
        """Stay in the first pass until the other thread begins its own."""
        with SelectiveCache(llama, settings) as cache:
            run = cache.caches[1].forward

            def pause(*given):
                inside.set()
                waits.wait(20)
                return run(*given)

            cache.caches[1].forward = pause
            found[0] = cache.read(ids[0])

    def second():
        with SelectiveCache(llama, settings) as cache:
            inside.wait(20)
            waits.set()
            found[1] = cache.read(ids[1])

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [torch.equal(found[at], truth[at]) for at in range(2)] == [True, True]
    assert llama.config._attn_implementation == "sdpa"


def test_a_pass_that_was_interrupted_leaves_the_model_to_others(llama, monkeypatch):
    """Neither Ctrl-C nor another BaseException runs torch's hooks after a pass."""
    settings = CacheSettings("h2o-default", cache_length=20)
    with SelectiveCache(llama, settings) as cache:
        truth = cache.read(tokens(1, 1, 5))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def interrupted():
        with SelectiveCache(llama, settings) as cache:
            monkeypatch.setattr(cache.caches[1], "forward", interrupt)
            cache.read(tokens(1, 1, 5))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert llama.config._attn_implementation == "sdpa"
    assert torch.is_grad_enabled()
    with SelectiveCache(llama, settings) as cache:
        monkeypatch.setattr(cache.caches[1], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.read(tokens(1, 1, 5))
        monkeypatch.undo()
        with pytest.raises(ClosedError, match="ended midway"):
            cache.read(tokens(1, 1, 5))
        cache.reset()
        assert torch.equal(cache.read(tokens(1, 1, 5)), truth)


@pytest.mark.parametrize("name", ["h2o-torch-quantized8", "snapkv-default", "mix-h2o+keydiff-int8"])
def test_a_copy_goes_on_by_itself(llama, name):
    ids, more = tokens(20, 2, 50), tokens(21, 2, 9)
    mask = (torch.arange(50) >= torch.tensor([[0], [7]])).long()
    settings = CacheSettings(name, cache_length=20, cache_kwargs={"grace_period": 3})
    with SelectiveCache(llama, settings, 2) as cache:
        cache.read(ids, mask)
        with copy.deepcopy(cache) as other, copy.copy(cache) as third:
            assert other.get_seq_length() == 50
            told = other.read(more)
            other.read(tokens(22, 2, 9))
            assert torch.equal(cache.read(more), told)
            assert torch.equal(third.read(more), told)
        assert cache.read(more).isfinite().all()
        cache.shrink(12)
        with copy.deepcopy(cache) as shrunk:
            assert torch.equal(cache.read(more), shrunk.read(more))


def test_a_reset_brings_the_batch_back_that_was_opened(llama):
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20)) as cache:
        truth = cache.read(tokens(1, 1, 9))
        for rows in ([0, 0, 0], [0, 0]):
            cache.reorder_cache(torch.tensor(rows))
            cache.reset()
            assert torch.equal(cache.read(tokens(1, 1, 9)), truth)
    with SelectiveCache(llama, CacheSettings("h2o-default", cache_length=20), 2) as cache:
        cache.read(tokens(1, 2, 9))
        cache.batch_select_indices(torch.tensor([1]))
        cache.reset()
        with pytest.raises(ConfigError, match="a batch of 1 for a SelectiveCache of 2 rows"):
            cache.read(tokens(1, 1, 9))
        assert cache.read(tokens(1, 2, 9)).shape == (2, 211)


@pytest.mark.parametrize("policy", ["dense", "lastrec", "keydiff", "knorm", "random"])
def test_policies_without_weights_keep_temporary_arrays_small(llama, policy):
    settings = CacheSettings(f"{policy}-default", cache_length=64, chunk_size=16)
    ids = tokens(30, 1, 60)
    with SelectiveCache(llama, settings) as cache:
        cache.read(ids[:, :20])
        truth = cache.read(ids[:, 20:])
    small = 8 * 4 * 64 * 3 / 1e9  # the masks of three queries
    with SelectiveCache(llama, settings, attention_forward_temp_size_gb=small) as cache:
        cache.read(ids[:, :20])
        assert (cache.read(ids[:, 20:]) - truth).abs().max() < 1e-4
    with SelectiveCache(llama, settings, attention_forward_temp_size_gb=1e-8) as cache:
        cache.read(ids[:, :20])
        with pytest.raises(ConfigError, match="the limit is 1e-08 GB"):
            cache.read(ids[:, 20:])
        assert cache.get_seq_length() == 20


LENGTH_ROPE = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 2.0, 6.0, 16.0] * 2,
    },
}


def with_length_rope(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **LENGTH_ROPE[kind]}
    return make(max_position_embeddings=64 if kind == "dynamic" else 512, rope_parameters=rope)


@pytest.mark.parametrize("total", [60, 150])
@pytest.mark.parametrize("kind", LENGTH_ROPE)
@pytest.mark.parametrize("yarn_rope", [True, False])
def test_rope_by_length_in_steps_is_that_of_one_pass(kind, total, yarn_rope):
    model = with_length_rope(kind)
    ids = tokens(10, 1, total)
    with torch.no_grad():
        truth = with_length_rope(kind)(ids).logits
        model(tokens(11, 1, 200))  # dynamic RoPE keeps the longest length that it has met
    settings = CacheSettings("dense-default", cache_length=200)
    with SelectiveCache(model, settings, yarn_rope=yarn_rope) as cache:
        cache.steps(total)
        found = passes(model, cache, ids[:, :7], random.Random(1))
        found = torch.cat((found, passes(model, cache, ids, random.Random(2))), dim=1)
    assert (found - truth).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "total", "reach"), [("dynamic", 50, 63), ("dynamic", 90, 90), ("longrope", 50, 64)]
)
def test_a_pass_beyond_the_length_that_rope_was_fixed_for_is_refused(kind, total, reach):
    model = with_length_rope(kind)
    ids = tokens(10, 1, 150)
    settings = CacheSettings("dense-default", cache_length=200)
    with SelectiveCache(model, settings) as cache:
        cache.steps(total)
        cache.read(ids[:, :reach])
        with pytest.raises(ConfigError, match=rf"up to {reach} tokens, and a pass reaches 120"):
            cache.read(ids[:, reach:120])
        with pytest.raises(ConfigError, match="depends on the length"):
            cache.steps(120)
        assert cache.get_seq_length() == reach
        cache.reset()
        assert cache.read(ids[:, :120]).isfinite().all()


@pytest.mark.parametrize("kind", LENGTH_ROPE)
def test_generate_rotates_for_prompt_and_answer(kind):
    model = with_length_rope(kind)
    ids = tokens(10, 1, 50)
    settings = CacheSettings("dense-default", cache_length=200)
    given = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    made = generate(model, ids, settings, **given)
    with torch.no_grad():
        truth = with_length_rope(kind)(made).logits
    # One pass over all tokens says each of them; the last one is never read.
    assert torch.equal(truth[0, 49:-1].argmax(-1), made[0, 50:])


def test_generate_of_a_model_that_leaves_its_cache_is_refused():
    """Phi-3 reads all tokens again, without the cache, where its rotation would change."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 211}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **LENGTH_ROPE["longrope"]}
    config = transformers.Phi3Config(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={**rope, "partial_rotary_factor": 1.0},
        pad_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    settings = CacheSettings("dense-default", cache_length=200)
    given = {"min_new_tokens": 10, "max_new_tokens": 10, "do_sample": False}
    assert generate(model, tokens(10, 1, 100), settings, **given).shape == (1, 110)
    with pytest.raises(ConfigError, match="without the cache that it was given"):
        generate(model, tokens(10, 1, 60), settings, **given)
