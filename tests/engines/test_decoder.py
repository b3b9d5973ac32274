"""Decoder: architectures other than Llama, recognised by keys and passes, not by a list."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from fusing import context_of, decoder_of, kv_of, last_logits, model_of, plain, world
from tinymodels import COMMON, some

from kvtrie.engines.transformers import Decoder
from kvtrie.errors import ConfigError
from kvtrie.fuse import Controller, Fusor
from kvtrie.fuse.gate import divergence
from kvtrie.fuse.passes import PassTable
from kvtrie.fuse.profile import Profile

pytestmark = pytest.mark.engine

NARROW = {"head_dim": 8}
WINDOWED = {"sliding_window": 16, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}
# Which layers turn neighbours (True) or halves (False) of a head; None where keys do not turn.
KINDS = {
    "Gemma2": (NARROW | WINDOWED, [False] * 4),
    "Gemma3Text": (NARROW | WINDOWED, [False] * 4),
    "Phi3": ({}, [False] * 4),
    "Phi": ({}, [False] * 4),
    "GPTNeoX": ({}, [False] * 4),
    "StableLm": ({}, [False] * 4),
    "Glm": (NARROW, [True] * 4),
    "Cohere2": ({}, [True, True, True, None]),
    "SmolLM3": ({}, [False, False, False, None]),
    "Olmo2": ({}, [False] * 4),
    "Qwen3Moe": (
        NARROW | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        [False] * 4,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_decoders_fuse_too(name):
    more, turning = KINDS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    given = COMMON | {"num_hidden_layers": 4, "num_key_value_heads": 2} | more
    model = transformers.AutoModelForCausalLM.from_config(config(**given)).eval()
    decoder = Decoder(model)
    context = context_of(decoder, (17, 9, 12))
    apart = []
    for select, ratio in (("first", 1.0), ("values+question", 0.3)):
        with Fusor(decoder, select=select, ratio=ratio).fuse(context) as fused:
            truth = last_logits(model, fused.ids)
            apart.append(divergence(truth, last_logits(model, fused.ids, fused.cache)))
    assert apart[0] < 1e-8 < apart[1]
    assert decoder._pairs == turning


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-4)])
def test_short_formats_pass_the_gate_by_their_own_measure(dtype, allowed):
    model = model_of(head_dim=16).to(dtype)
    decoder = Decoder(model)
    with Fusor(decoder, ratio=1.0).fuse(context_of(decoder, (17, 9, 12))) as fused:
        truth = last_logits(model, fused.ids).float()
        assert divergence(truth, last_logits(model, fused.ids, fused.cache).float()) < allowed


def test_values_before_a_layer_runs_are_those_it_hands_to_its_cache():
    _, decoder = decoder_of("qwen2")
    ids = some(1, 1, 12)[0]
    kv = kv_of(decoder, ids)
    places = torch.arange(12)
    hidden = decoder.embed(ids)
    for layer in range(decoder.layers):
        assert torch.allclose(decoder.values(layer, hidden), kv[layer][1], atol=1e-5)
        keys, _ = decoder.project(layer, hidden, places, 12)
        assert torch.allclose(keys, kv[layer][0], atol=1e-5)
        hidden = decoder.layer(layer, hidden, places, 12, lambda k, v: (k, v))
    truth = decoder.model(ids[None]).logits[0]
    assert torch.allclose(decoder.head(hidden), truth, atol=1e-4)


def test_a_fused_cache_holds_one_sequence_and_can_be_cropped():
    model, decoder = decoder_of()
    with Fusor(decoder).fuse(context_of(decoder, (17, 9))) as fused:
        right = last_logits(model, fused.ids, fused.cache)
        assert fused.cache.get_seq_length() == fused.ids.shape[1]
        fused.cache.crop(-1)
        assert torch.equal(last_logits(model, fused.ids, fused.cache), right)
        with pytest.raises(ConfigError, match="cannot crop by -99 of"):
            fused.cache.crop(-99)
        with pytest.raises(ConfigError, match="one sequence, the pass has 2"):
            last_logits(model, fused.ids.expand(2, -1), fused.cache)


def test_a_model_in_training_mode_or_with_other_attention_is_refused():
    with pytest.raises(ConfigError, match="training mode"):
        Decoder(model_of().train())
    model = model_of()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="flex_attention"):
        Decoder(model)


def test_a_controller_chooses_unless_a_ratio_is_given():
    model, decoder = decoder_of()
    store, _ = world(model)
    chosen = []

    class RecordingController:
        def ratio(self, fetch, query, *, waits):
            chosen.append((len(fetch.parts), query, waits))
            return 0.5

        def observe(self, _, **of):
            chosen.append(of["waits"])

    context = plain((16, 16, 16))
    query = len(context.query)
    with Fusor(decoder, store, controller=RecordingController()).fuse(context) as fused:
        assert fused.log.ratio == 0.5
    # Of 4 layers the default selection reads those up to the one at .65 of the way.
    assert chosen == [(3, query, 3), 3]
    with Fusor(decoder, store, ratio=0.25, controller=RecordingController()).fuse(context) as fused:
        assert fused.log.ratio == 0.25
    assert chosen[2:] == [3]
    with Fusor(decoder, store).fuse(context) as fused:
        assert fused.log.ratio == 0.15


def test_a_controller_chooses_the_ratio_and_gets_its_cost():
    model, decoder = decoder_of()
    store, _ = world(model)
    measured = []

    class MeasuringController(Controller):
        def observe(self, recompute_ns, **of):
            measured.append((recompute_ns, of))
            super().observe(recompute_ns, **of)

    row = (1e6, 1e8)
    profile = Profile(
        cost=None, lanes={}, both={}, passes=PassTable((0, 512), (1, 512), (row, row))
    )
    controller = MeasuringController(profile, store, floor=0.25)
    context = plain((16, 16, 16))
    with Fusor(decoder, store, select="values", ratio=None, controller=controller).fuse(
        context
    ) as fused:
        assert fused.log.shares[-1] == pytest.approx(0.25)
        query = len(context.query)
        pairs = int(fused.log.grid.sum())
    assert measured == [
        (
            fused.cost_ns,
            {"pairs": pairs, "layers_full": 2, "tokens": 48, "query": query, "waits": 0},
        )
    ]
    assert pairs == 2 * (32 + query - 1) + 2 * (12 + query - 1)
    assert np.isfinite(controller.pace)


def test_one_thread_at_a_time_uses_a_decoder():
    _, decoder = decoder_of()
    ids = [some(seed, 1, 30)[0] for seed in range(4)]

    def work(part):
        places = torch.arange(len(part))
        weights = torch.zeros(len(part))
        hidden = decoder.embed(part)
        hidden = decoder.layer(0, hidden, places, len(part), lambda k, v: (k, v), weights=weights)
        return hidden, weights, decoder.head(hidden), decoder.prefill(part)

    truth = [work(part) for part in ids]
    with ThreadPoolExecutor(4) as threads:
        for mine, right in zip(threads.map(work, ids * 5), truth * 5, strict=True):
            assert all(torch.equal(*both) for both in zip(mine, right, strict=True))
