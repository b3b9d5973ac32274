"""RoPE that depends on a sequence's length: cached equals uncached, or it is refused."""

import pytest
import torch
from tinymodels import BLOCK, COMMON, lose, serve, some
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtrie import Scope
from kvtrie.engines.transformers import KvtrieCache
from kvtrie.engines.transformers.rope import RopeLimits
from kvtrie.errors import ConfigError

pytestmark = pytest.mark.engine

ORIGINAL = 64
LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 6.0, 16.0]}
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL} | LONG,
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def llama_with(kind):
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | KINDS[kind]
    longest = {"max_position_embeddings": ORIGINAL if kind == "dynamic" else 512}
    config = LlamaConfig(
        num_key_value_heads=2, rope_parameters=rope, **(COMMON | longest | {"num_hidden_layers": 3})
    )
    return LlamaForCausalLM(config).eval()


def phi3():
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0} | LONG
    config = Phi3Config(
        num_key_value_heads=2,
        rope_parameters=rope,
        original_max_position_embeddings=ORIGINAL,
        **(COMMON | {"num_hidden_layers": 3}),
    )
    return Phi3ForCausalLM(config).eval()


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def served(model, executor, ids):
    """Logits of the tokens after the match, and the number of matched tokens."""
    with torch.no_grad(), KvtrieCache(model, executor, ids) as cache:
        past = cache.get_seq_length()
        return model(ids[:, past:], past_key_values=cache).logits, past


def test_every_kind_of_rope_is_tried():
    assert set(KINDS) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("kind", [*KINDS, "phi3"])
def test_below_and_above_the_original_length_cached_equals_uncached(kind):
    model = phi3() if kind == "phi3" else llama_with(kind)
    executor = serve(model)
    ids = some(1, 1, 110)
    matched = {}
    for length in (40, 63, 64, 65, 100, 110, 64, 40):
        right = logits(model, ids[:, :length])
        if kind == "dynamic" and length >= ORIGINAL:
            with pytest.raises(ConfigError, match=f"beyond {ORIGINAL - 1}.* {length} tokens"):
                KvtrieCache(model, executor, ids[:, :length])
            continue
        for _ in range(2):
            mine, past = served(model, executor, ids[:, :length])
            assert (mine - right[:, past:]).abs().max() < 1e-4
        matched[length] = past
    assert matched[40] >= 32
    if kind != "dynamic":
        assert matched[110] >= 104  # long prompts share with each other
    executor.manager.audit()


@pytest.mark.parametrize("kind", [*KINDS, "phi3"])
def test_across_the_original_length_cached_equals_uncached_or_it_is_refused(kind):
    model = phi3() if kind == "phi3" else llama_with(kind)
    executor = serve(model)
    ids = some(2, 1, 80)
    refused_from = {"dynamic": ORIGINAL, "longrope": ORIGINAL + 1, "phi3": ORIGINAL + 1}
    with torch.no_grad(), KvtrieCache(model, executor, ids[:, :56]) as cache:
        for end in range(56, 81):
            past = cache.get_seq_length()
            if end == refused_from.get(kind):
                with pytest.raises(ConfigError, match=f"beyond {end - 1}"):
                    model(ids[:, past:end], past_key_values=cache)
                break
            mine = model(ids[:, past:end], past_key_values=cache).logits
            assert (mine - logits(model, ids[:, :end])[:, past:]).abs().max() < 1e-4
    # The next request finds the blocks that this one computed.
    for length in (72, 60):
        if kind == "dynamic" and length >= ORIGINAL:
            continue
        mine, past = served(model, executor, ids[:, :length])
        assert (mine - logits(model, ids[:, :length])[:, past:]).abs().max() < 1e-4
    executor.manager.audit()


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_holes_before_the_original_length_are_rotated_as_the_whole_prompt(kind):
    model = llama_with(kind)
    executor = serve(model, 24, 60, lossy=True)
    ids = some(3, 1, 100)
    right = logits(model, ids)
    served(model, executor, ids)
    served(model, executor, some(4, 1, 180))  # pushes the first prompt down
    with KvtrieCache(model, executor, ids) as cache:
        scope = cache.scope
    served(model, executor, some(5, 1, 180))
    lost = lose(executor, ids, {1, 3, 4}, scope)
    opened = KvtrieCache(model, executor, ids, use_layerwise=False)
    with torch.no_grad(), opened as cache:
        assert cache.recovered == len(lost) * BLOCK
        past = cache.get_seq_length()
        mine = model(ids[:, past:], past_key_values=cache).logits
    assert (mine - right[:, past:]).abs().max() < 1e-4
    assert max(lost) * BLOCK + BLOCK <= ORIGINAL


def test_a_long_prompt_in_short_pieces_is_refused():
    model = llama_with("longrope")
    executor = serve(model)
    ids = some(6, 1, 100)
    with torch.no_grad(), KvtrieCache(model, executor, ids) as cache:
        with pytest.raises(ConfigError, match=r"beyond 64 tokens.*more than that.*up to 30 tokens"):
            model(ids[:, :30], past_key_values=cache)
        mine = model(ids, past_key_values=cache).logits
        assert (mine - logits(model, ids)).abs().max() < 1e-4


def test_short_rows_do_not_change_next_to_a_long_one():
    """A batch is rotated by its longest row, so its short rows serve no short request."""
    model = llama_with("longrope")
    executor = serve(model)
    short, long = some(7, 1, 40), some(8, 1, 100)
    ids = torch.cat([torch.cat([torch.zeros(1, 60, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :60] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        right = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for _ in range(2):
            with KvtrieCache(model, executor, ids, attention_mask=mask) as cache:
                past = cache.get_seq_length()
                mine = model(
                    ids[:, past:],
                    attention_mask=mask,
                    position_ids=positions[:, past:],
                    past_key_values=cache,
                ).logits
                for row, start in enumerate((60, 0)):
                    begin = max(start, past)
                    wrong = mine[row, begin - past :] - right[row, begin:]
                    assert (wrong).abs().max() < 1e-4
    mine, past = served(model, executor, short)
    assert past == 0
    assert (mine - logits(model, short)).abs().max() < 1e-4


def test_the_lengths_are_read_per_kind_of_layer():
    config = LlamaConfig(**COMMON)
    config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64} | LONG,
        "sliding_attention": {"rope_type": "default"},
    }
    rope = RopeLimits.of(config)
    assert rope == RopeLimits((64,), None)
    assert [rope.regime(length) for length in (1, 64, 65)] == [0, 0, 1]
    assert rope.scope(None, 0) is None
    assert rope.scope(Scope(lora="a"), 1) != Scope(lora="a")
    config.rope_parameters["sliding_attention"] = {"rope_type": "spiral"}
    with pytest.raises(ConfigError, match="'spiral'"):
        RopeLimits.of(config)
