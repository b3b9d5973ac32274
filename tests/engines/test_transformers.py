"""KvtrieCache under real models: the same tokens as without it, whatever happened to the KV."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from tinymodels import BLOCK, COMMON, agree, answer, before, close, full, serve, some, stored_kv
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtrie import BlockManager, Cost, ModelShape, Tier
from kvtrie.engines.transformers import KvtrieCache
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.model.layout import Layout
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

pytestmark = pytest.mark.engine

WINDOW = 24
MODELS = {
    "llama, tied heads, 4 queries per key": (
        LlamaForCausalLM,
        LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **COMMON),
    ),
    "llama, untied heads, 2 queries per key": (
        LlamaForCausalLM,
        LlamaConfig(num_key_value_heads=4, tie_word_embeddings=False, **COMMON),
    ),
    "qwen2, windows in some layers": (
        Qwen2ForCausalLM,
        Qwen2Config(
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=2,
            **COMMON,
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(num_key_value_heads=2, head_dim=16, **COMMON)),
    "mistral, windows in all layers": (
        MistralForCausalLM,
        MistralConfig(num_key_value_heads=4, sliding_window=WINDOW, **COMMON),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    kind, config = MODELS[request.param]
    return kind(config).eval()


@pytest.mark.parametrize("layer_slots", [False, True])
def test_a_second_call_reuses_every_bit(model, layer_slots):
    executor = serve(model, layer_slots=layer_slots)
    ids = some(1, 1, 50)
    truth = answer(model, ids)
    with KvtrieCache(model, executor, ids) as cache:
        assert cache.get_seq_length() == 0
        agree(truth, answer(model, ids, cache))
        stored = stored_kv(cache, 48)
    with KvtrieCache(model, executor, ids) as cache:
        assert cache.get_seq_length() == 48
        assert cache.recovered == 0
        agree(truth, answer(model, ids, cache))
        for (keys, values), (old_keys, old_values) in zip(
            stored_kv(cache, 48), stored, strict=True
        ):
            assert torch.equal(keys, old_keys)
            assert torch.equal(values, old_values)
    executor.manager.audit()


def test_a_plain_forward_continues_the_match(model):
    executor = serve(model)
    ids = some(2, 1, 60)
    truth, kv = full(model, ids)
    for cut in (20, 60):
        with torch.no_grad(), KvtrieCache(model, executor, ids[:, :cut]) as cache:
            past = cache.get_seq_length()
            logits = model(ids[:, past:cut], past_key_values=cache).logits
            assert (logits - truth[:, past:cut]).abs().max() < 1e-4
            close(cache, kv, cut)


@pytest.mark.grid
@pytest.mark.parametrize("layer_slots", [False, True])
@pytest.mark.parametrize("use_layerwise", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_holes_anywhere_are_recomputed_in_place(model, layer_slots, use_layerwise, seed):
    """Blocks that cannot be read back become holes; their KV and all logits are as before.

    Layer by layer that is found out amid the pass, which is held up for the recovery.
    """
    executor = serve(model, 22, 60, layer_slots=layer_slots, lossy=True)
    manager, (gpu, host) = executor.manager, executor.pools
    ids = some(seed, 1, 75)
    truth, kv = full(model, ids)
    with KvtrieCache(model, executor, ids) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
    other = some(99, 1, 170)  # fills the first tier and so pushes the first prompt down
    with KvtrieCache(model, executor, other) as cache, torch.no_grad():
        model(other, past_key_values=cache)
    executor.drain()
    match = manager.lookup(ids[0].numpy(), now=executor.clock())
    below = {
        index: copy.slot
        for index, block in enumerate(match.blocks)
        for copy in block.copies
        if copy.tier == 1
    }
    lost = [index for index in below if torch.rand(()) < 0.5] or [min(below)]
    gpu.lost = frozenset(
        unit for index in lost for unit in host.units(below[index], 0, host.layers).tolist()
    )
    opened = KvtrieCache(model, executor, ids, use_layerwise=use_layerwise)
    with opened as cache, torch.no_grad():
        past = cache.get_seq_length()
        assert past == 72
        assert cache.recovered == (0 if use_layerwise else len(lost) * BLOCK)
        logits = model(ids[:, past:], past_key_values=cache).logits
        # A pass does not learn which block of a layer failed, so it drops all blocks of that load.
        assert cache.recovered in range(len(lost) * BLOCK, past + 1, BLOCK)
        assert use_layerwise or cache.recovered == len(lost) * BLOCK
        close(cache, kv, past)
        assert (logits - truth[:, past:]).abs().max() < 1e-4
    manager.audit()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("structure", "layer_slots"),
    [
        ("holes", True),
        ("leaf-only", False),
        pytest.param("holes", False, marks=pytest.mark.deep),
        pytest.param("leaf-only", True, marks=pytest.mark.deep),
    ],
)
def test_conversations_that_do_not_fit_stay_the_same(model, structure, layer_slots):
    executor = serve(model, 14, 12, layer_slots=layer_slots, structure=structure)
    system = some(3, 1, 20)
    histories = [torch.cat([system, some(10 + chat, 1, 15)], 1) for chat in range(4)]
    recovered = 0
    for turn in range(3):
        for chat, history in enumerate(histories):
            truth = answer(model, history, steps=6)
            with KvtrieCache(
                model, executor, history, reserve=6, sessions=[f"chat {chat}"]
            ) as cache:
                recovered += cache.recovered
                agree(truth, answer(model, history, cache, steps=6))
            executor.manager.audit()
            histories[chat] = torch.cat([truth.sequences, some(50 + turn, 1, 10)], 1)
    assert (recovered > 0) == (structure == "holes")


def test_only_what_is_missing_is_computed_and_written(llama):
    executor = serve(llama, 8, layer_slots=True, policy="retention")  # it drops layer by layer
    manager, pool = executor.manager, executor.pools[0]
    ids, other = some(27, 1, 50), some(28, 1, 34)
    for prompt in (ids, other):  # the second takes the room of a few layers of the first
        with KvtrieCache(llama, executor, prompt) as cache, torch.no_grad():
            llama(prompt, past_key_values=cache)
    found = manager.lookup(ids[0].numpy(), now=executor.clock()).blocks
    views = {
        (index, layer): pool.view(int(slot))
        for index, block in enumerate(found)
        for copy in block.copies
        for layer, slot in enumerate(copy.slots, copy.layer_lo)
    }
    deepest = max(
        layer
        for index in range(len(found))
        for layer in range(pool.layers)
        if (index, layer) not in views
    )
    assert deepest < pool.layers - 1
    assert any((index, deepest) in views for index in range(len(found)))
    for each in views.values():
        each[0].add_(1.0)  # so that writing the same again would show
    stored = {at: tuple(each.clone() for each in view) for at, view in views.items()}
    ran = []
    with ExitStack() as watched:
        for at, layer in enumerate(llama.model.layers):
            watched.enter_context(before(layer, partial(ran.append, at)))
        with KvtrieCache(llama, executor, ids) as cache:
            assert cache.recovered > 0
            assert ran == list(range(deepest + 1))
            now = stored_kv(cache, 48)
    for (index, layer), old in stored.items():
        for each, right in zip(now[layer], old, strict=True):
            assert torch.equal(each[:, index * BLOCK : (index + 1) * BLOCK].transpose(0, 1), right)


def test_sampling_with_a_seed_is_the_same(model):
    executor = serve(model)
    ids = some(4, 1, 40)
    for _ in range(2):
        torch.manual_seed(7)
        truth = answer(model, ids, do_sample=True, top_k=0)
        torch.manual_seed(7)
        with KvtrieCache(model, executor, ids) as cache:
            agree(truth, answer(model, ids, cache, do_sample=True, top_k=0))


@pytest.mark.grid
@pytest.mark.parametrize("layer_slots", [False, True])
def test_beams_are_the_same(model, layer_slots):
    executor = serve(model, layer_slots=layer_slots)
    ids = some(5, 2, 37)
    how = {"num_beams": 4, "num_return_sequences": 3}
    truth = model.generate(ids, max_new_tokens=14, do_sample=False, **how)
    for _ in range(2):
        with KvtrieCache(model, executor, ids) as cache:
            mine = model.generate(
                ids, past_key_values=cache, max_new_tokens=14, do_sample=False, **how
            )
            assert torch.equal(mine, truth)
        executor.drain()
        executor.manager.audit()


def test_batches_of_different_lengths_are_the_same(model):
    executor = serve(model, 120)
    lengths = (60, 23, 41)
    ids, mask = torch.zeros(3, 60, dtype=torch.long), torch.zeros(3, 60, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = some(6, 60)[:length] if row < 2 else some(7, length)
        mask[row, -length:] = 1
    truth = answer(model, ids, attention_mask=mask)
    pasts = []
    for _ in range(2):
        with KvtrieCache(model, executor, ids, attention_mask=mask) as cache:
            pasts.append(cache.get_seq_length())
            tokens = cache.leases[0].tokens
            stored = stored_kv(cache, tokens)
            agree(truth, answer(model, ids, cache, attention_mask=mask))
            # A batch computes again the end of its longer matches, and does not store it again.
            for mine, old in zip(stored_kv(cache, tokens), stored, strict=True):
                assert all(map(torch.equal, mine, old))
    assert pasts == [0, 53]  # padding of the second row and its two cached blocks


@pytest.mark.parametrize("layer_slots", [False, True])
def test_a_crop_forgets_the_end(model, layer_slots):
    executor = serve(model, layer_slots=layer_slots)
    ids, other = some(8, 1, 50), some(9, 1, 13)
    branch = torch.cat([ids[:, :37], other], 1)
    truth = full(model, branch)[0]
    with torch.no_grad(), KvtrieCache(model, executor, ids[:, :30]) as cache:
        model(ids[:, :30], past_key_values=cache)
        model(ids[:, 30:], past_key_values=cache)
        cache.crop(-13)
        assert cache.get_seq_length() == 37
        logits = model(other, past_key_values=cache).logits
        assert (logits - truth[:, 37:]).abs().max() < 1e-4
        with pytest.raises(ConfigError):
            cache.crop(1)
        with pytest.raises(ConfigError):
            cache.crop(-51)
        cache.reset()
        assert cache.get_seq_length() == 0
    executor.manager.audit()
    with KvtrieCache(model, executor, ids) as cache:
        assert cache.get_seq_length() == 48  # cropping one request takes nothing from others
        for mine, right in zip(stored_kv(cache, 48), full(model, ids)[1], strict=True):
            assert (mine[0] - right[0][0, :, :48]).abs().max() < 1e-4


def test_assisted_decoding_rolls_back(llama):
    executor = serve(llama)
    ids = some(10, 1, 9).repeat(1, 4)
    truth = answer(llama, ids)
    with KvtrieCache(llama, executor, ids) as cache:
        agree(truth, answer(llama, ids, cache, prompt_lookup_num_tokens=4))
    executor.manager.audit()


def test_a_prompt_in_chunks_is_the_same(llama):
    executor = serve(llama)
    ids = some(11, 1, 50)
    truth = answer(llama, ids)
    with KvtrieCache(llama, executor, ids) as cache:
        agree(truth, answer(llama, ids, cache, prefill_chunk_size=7))


def test_eager_attention_recovers_too(llama):
    executor = serve(llama, 8)
    ids = some(12, 1, 50)
    llama.set_attn_implementation("eager")
    try:
        truth = answer(llama, ids, steps=4)
        for prompt in (ids, some(13, 1, 30), ids):
            with KvtrieCache(llama, executor, prompt, reserve=4) as cache:
                mine = answer(llama, prompt, cache, steps=4)
        assert cache.recovered > 0
        agree(truth, mine)
    finally:
        llama.set_attn_implementation("sdpa")


def test_rows_can_be_chosen_and_repeated(llama):
    executor = serve(llama)
    ids = some(14, 3, 20)
    with torch.no_grad(), KvtrieCache(llama, executor, ids) as cache:
        llama(ids, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([False, True, True]))
        cache.batch_repeat_interleave(2)
        assert len(cache.leases) == 4
        following = some(15, 4, 3)
        logits = llama(following, past_key_values=cache).logits
    for row, source in enumerate((1, 1, 2, 2)):
        right = full(llama, torch.cat([ids[source], following[row]])[None])[0]
        assert (logits[row] - right[0, 20:]).abs().max() < 1e-4
    executor.drain()
    executor.manager.audit()


def test_an_attention_that_was_exchanged_is_another_model(llama):
    executor = serve(llama, 8)
    ids = some(23, 1, 50)
    for prompt in (ids, some(24, 1, 30)):
        with KvtrieCache(llama, executor, prompt) as cache, torch.no_grad():
            llama(prompt, past_key_values=cache)
    implementation = llama.config._attn_implementation
    llama.config._attn_implementation = "flash_attention_2"
    try:
        with pytest.raises(ConfigError, match="other attributes or functions of modules"):
            KvtrieCache(llama, executor, ids)
    finally:
        llama.config._attn_implementation = implementation
    assert executor.manager.stats().leases == 0


def test_another_end_may_follow_a_crop(llama):
    executor = serve(llama)
    ids, other = some(25, 1, 40), some(26, 1, 10)
    truth = full(llama, torch.cat([ids[:, :21], other], 1))[0]
    with torch.no_grad(), KvtrieCache(llama, executor, ids) as cache:
        llama(ids, past_key_values=cache)
        cache.crop(-19)
        logits = llama(other, past_key_values=cache).logits
        assert (logits - truth[:, 21:]).abs().max() < 1e-4


def test_tokens_that_do_not_continue_the_prompt_are_refused(llama):
    executor = serve(llama)
    ids = some(16, 1, 40)
    with torch.no_grad(), KvtrieCache(llama, executor, ids) as cache:
        llama(ids, past_key_values=cache)
    with torch.no_grad(), KvtrieCache(llama, executor, ids) as cache:
        with pytest.raises(ConfigError, match="pass only what follows"):
            llama(ids, past_key_values=cache)  # 32 columns are there already
        with pytest.raises(ConfigError, match="input_ids"):
            llama(inputs_embeds=llama.get_input_embeddings()(ids[:, 32:]), past_key_values=cache)
        logits = llama(ids[:, 32:], past_key_values=cache).logits  # and nothing has changed
        assert (logits - full(llama, ids)[0][:, 32:]).abs().max() < 1e-4
        cache.batch_repeat_interleave(2)
        with pytest.raises(ConfigError, match="batch of 3"):
            llama(some(17, 3, 2), past_key_values=cache)


def test_padding_on_the_right_is_refused(llama):
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[0, -1] = 0
    with pytest.raises(ConfigError, match="on the left"):
        KvtrieCache(llama, serve(llama), some(18, 1, 10), attention_mask=mask)
    with pytest.raises(ConfigError, match="attention_mask is"):
        KvtrieCache(llama, serve(llama), some(18, 1, 10), attention_mask=mask[:, :9])


def test_a_mask_that_hides_tokens_is_refused(llama):
    ids = some(29, 1, 20)
    ids[0, 7] = llama.config.pad_token_id
    executor = serve(llama)
    with KvtrieCache(llama, executor, ids) as cache:
        with pytest.raises(ConfigError, match=r"row 0 does not fit at token 7.*given an attention"):
            llama.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
        padded = torch.ones_like(ids)
        padded[0, :3] = 0  # unknown to the cache, which was opened without padding
        with pytest.raises(ConfigError, match="at token 0"):
            answer(llama, ids, cache, attention_mask=padded)
        agree(answer(llama, ids), answer(llama, ids, cache))


def test_a_model_that_the_pool_was_not_made_for_is_refused(llama):
    torch.manual_seed(1)
    kind, config = MODELS["llama, untied heads, 2 queries per key"]
    with pytest.raises(ConfigError, match="KV heads"):
        KvtrieCache(kind(config), serve(llama), some(19, 1, 10))


def test_an_opening_without_room_leaves_nothing_behind(llama):
    executor = serve(llama, 6)
    before = executor.manager.stats()
    with pytest.raises(NoSpaceError):
        KvtrieCache(llama, executor, some(20, 2, 30))  # the second row does not fit
    with KvtrieCache(llama, executor, some(20, 2, 30)[:1], reserve=16):
        pass
    executor.manager.audit()
    assert executor.manager.stats().leases == before.leases == 0


def test_a_closed_cache_reports_the_blocks_that_it_used(llama, monkeypatch):
    executor, reported = serve(llama), []
    monkeypatch.setattr(
        executor, "used", lambda blocks: reported.append((executor.manager.stats().leases, blocks))
    )
    prompts = some(23, 2, 3 * BLOCK + 2)
    cache = KvtrieCache(llama, executor, prompts)
    llama.generate(prompts, past_key_values=cache, max_new_tokens=2, do_sample=False)
    cache.close()
    cache.close()
    for (leases, blocks), row in zip(reported, prompts, strict=True):
        assert leases == 0
        found = executor.manager.lookup(row.numpy(), now=executor.clock()).handles
        assert len(found) == 3
        assert blocks[:3].tolist() == found.tolist()


def test_closing_twice_and_forgetting_the_hook(llama):
    executor = serve(llama)
    hooks = len(llama.base_model._forward_pre_hooks)
    cache = KvtrieCache(llama, executor, some(21, 1, 10))
    cache.close()
    cache.close()
    assert cache.leases == ()
    assert len(llama.base_model._forward_pre_hooks) == hooks


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (Layout(dtype="bfloat16"), 0.01),
        (Layout(dtype="int8", scales="group"), 0.02),
        (Layout(dtype="int8", scales="token"), 0.02),
        (Layout(dtype="float8_e4m3fn", scales="group"), 0.1),
    ],
    ids=lambda given: f"{given.dtype} by {given.scales}" if isinstance(given, Layout) else "",
)
def test_logits_behind_a_quantised_host_stay_near(llama, layout, most):
    """Root mean square error of logits over their spread, with a whole prompt from the host tier.

    This model is random, with weights drawn wide: it forgives less than a trained one.
    """
    shape = ModelShape.from_config(llama.config)
    tiers = [Tier("gpu", blocks=22), Tier("host", blocks=60, layout=layout)]
    dear = Cost(ns_per_token=1e9)
    manager = BlockManager(shape, tiers, block_tokens=BLOCK, cost=dear)
    executor = Executor(manager, open_pools(shape, tiers, BLOCK), workers=0)
    for seed in range(3):
        ids = some(seed, 1, 75)
        truth, _ = full(llama, ids)
        for one in (ids, some(90 + seed, 1, 170)):  # the second pushes the first one down
            with KvtrieCache(llama, executor, one) as cache, torch.no_grad():
                llama(one, past_key_values=cache)
        executor.drain()
        before = manager.stats().tiers["host"].hits
        with KvtrieCache(llama, executor, ids) as cache, torch.no_grad():
            past = cache.get_seq_length()
            assert past == 72
            logits = llama(ids[:, past:], past_key_values=cache).logits
        assert manager.stats().tiers["host"].hits > before
        assert not manager.failed()
        assert cache.recovered == 0
        wrong = logits - truth[:, past:]
        assert 0 < wrong.square().mean().sqrt() < most * truth.std()
