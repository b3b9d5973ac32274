"""Shapes of models' folders: groups of layers as their classes and servers have them."""

import json

import numpy as np
import pytest
from hybrid_engine import Group, HybridEngine

from kvtrie import ConfigError, LayerGroup, ModelShape
from kvtrie.advise.model_folder import folder_shape
from kvtrie.advise.recording import Recorder
from kvtrie.cli import main
from kvtrie.sim.models import model_named
from kvtrie.sim.trace import TraceRequest

PLAIN = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
DELTA = PLAIN | {
    "model_type": "qwen3_next",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
}
MAMBA2 = PLAIN | {
    "model_type": "granitemoehybrid",
    "layers_block_type": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 16,
    "mamba_d_head": "auto",
    "mamba_d_state": 64,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
JAMBA = PLAIN | {
    "model_type": "jamba",
    "attn_layer_period": 4,
    "attn_layer_offset": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
NEMOTRON = PLAIN | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*E",
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "ssm_state_size": 64,
    "n_groups": 4,
    "conv_kernel": 4,
}
CONVOLUTIONS = PLAIN | {
    "model_type": "lfm2",
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}
GEMMA_4 = PLAIN | {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 64,
    "num_kv_shared_layers": 2,
}
# As transformers writes it.
SAVED_GEMMA_4 = PLAIN | {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {str(at): {"head_dim": 32, "num_key_value_heads": 1} for at in (1, 3)},
}


def shape(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder_shape(folder)


def state(layers, each):
    return LayerGroup(layers, kind="state", state_bytes=len(layers) * each)


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (PLAIN | {"sliding_window": None, "layer_types": None}, ()),
        (PLAIN | {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 8}, ()),
        (
            PLAIN | {"model_type": "gemma3_text", "sliding_window": 64},
            (LayerGroup((5,)), LayerGroup((0, 1, 2, 3, 4, 6, 7), kind="sliding", window=64)),
        ),
        (
            PLAIN | {"sliding_window_pattern": 4, "sliding_window": 64},
            (LayerGroup((3, 7)), LayerGroup((0, 1, 2, 4, 5, 6), kind="sliding", window=64)),
        ),
        (
            PLAIN | {"sliding_window": 64, "max_window_layers": 6},
            (LayerGroup(range(6)), LayerGroup((6, 7), kind="sliding", window=64)),
        ),
        (
            DELTA,
            (
                LayerGroup((3, 7)),
                state((0, 1, 2, 4, 5, 6), 2 * (3 * (2 * 2 * 16 + 4 * 32) + 4 * 32 * 16)),
            ),
        ),
        (
            DELTA | {"full_attention_interval": 2, "mamba_ssm_dtype": "float32"},
            (
                LayerGroup((1, 3, 5, 7)),
                state((0, 2, 4, 6), 2 * 3 * (2 * 2 * 16 + 4 * 32) + 4 * 4 * 32 * 16),
            ),
        ),
        (
            MAMBA2,
            (LayerGroup((2,)), state((0, 1, 3), 2 * (3 * (1024 + 2 * 2 * 64) + 1024 * 64))),
        ),
        (
            JAMBA,
            (LayerGroup((1, 5)), state((0, 2, 3, 4, 6, 7), 2 * (3 * 1024 + 1024 * 16))),
        ),
        (
            NEMOTRON,
            (LayerGroup((3,)), state((0, 2), 2 * 3 * (128 + 2 * 4 * 64) + 4 * 128 * 64)),
        ),
        (CONVOLUTIONS, (LayerGroup((2,)), state((0, 1, 3), 2 * 2 * 512))),
        (
            GEMMA_4,
            (
                LayerGroup((5,), kv_heads=1, head_dim=32),
                LayerGroup((0, 1, 2, 3, 4), kind="sliding", window=64),
            ),
        ),
        (
            SAVED_GEMMA_4,
            (
                LayerGroup((1, 3), kv_heads=1, head_dim=32),
                LayerGroup((0, 2), kind="sliding", window=64),
            ),
        ),
    ],
)
def test_layers_are_grouped_by_what_they_keep(tmp_path, config, groups):
    found = shape(tmp_path, config)
    assert found.groups == groups
    stated = (config.get(name) for name in ("layer_types", "layers_block_type"))
    pattern = config.get("hybrid_override_pattern")
    assert found.layers == len(next(filter(None, (*stated, pattern)), range(8)))
    assert (found.kv_heads, found.dtype, found.hidden) == (2, "bfloat16", 512)


def test_a_published_configuration_has_the_shape_of_its_name(tmp_path):
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_next",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "torch_dtype": "bfloat16",
    }
    found, named = shape(tmp_path, config), model_named("qwen3-next-80b")
    assert [one.layers for one in found.groups] == [one.layers for one in named.groups]
    assert found.block_bytes(16, 0) == named.block_bytes(16, 0)
    # transformers keeps a fourth row before the convolution.
    row = (2 * 16 * 128 + 32 * 128) * 2
    assert found.block_bytes(16, 1) == named.block_bytes(16, 1) - 36 * row


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "is no JSON object; --bytes-per-token N does"),
        ({"text_config": 5}, "text_config of .* is 5, a JSON object wanted"),
        (
            PLAIN | {"layer_types": ["lightning"] * 8},
            "a layer of layer_types is one of .*'lightning'",
        ),
        (PLAIN | {"layer_types": 8}, "layer_types is 8, a sequence wanted"),
        (
            PLAIN | {"layer_types": ["linear_attention", "full_attention"]},
            "conv_L_cache of the conf",
        ),
        (PLAIN | {"mamba_d_state": 16}, "does not say which layers keep states"),
        (NEMOTRON | {"hybrid_override_pattern": "M?"}, "a layer of the pattern is one of"),
        (DELTA | {"linear_key_head_dim": "wide"}, "linear_key_head_dim of the conf.* 'wide'"),
        (DELTA | {"mamba_ssm_dtype": "float7"}, "dtype of the states is one of .*'float7'"),
        (MAMBA2 | {"mamba_expand": None}, "mamba_expand of the configuration is None"),
        (PLAIN | {"ssm_cfg": {"d": 1}}, "ssm_cfg"),
        (PLAIN | {"per_layer_config": 5}, "per_layer_config is 5, a JSON object"),
        (PLAIN | {"per_layer_config": {"1": 5}}, "per_layer_config of layer 1 is 5"),
        (PLAIN | {"per_layer_config": {"1": {"head_dim": 0}}}, "head_dim of the conf.* is 0"),
        (PLAIN | {"per_layer_config": {"1": {"head_dim": 8}}}, "heads of one kind of layers"),
    ],
)
def test_layers_of_unknown_kind_or_size_are_refused(tmp_path, config, said):
    with pytest.raises(ConfigError, match=said):
        shape(tmp_path, config)


def test_a_shape_without_groups_is_that_of_the_configuration(tmp_path):
    assert shape(tmp_path, PLAIN) == ModelShape(
        8, 2, 64, "bfloat16", query_heads=8, hidden=512, groups=()
    )


WINDOW = Group("sliding_window", 64, 16)
SERVED = {
    "states": (DELTA, [Group("full_attention", 0, 64), Group("mamba", 0, 64)], 64),
    "blocks of 32 and 16 tokens": (GEMMA_4, [Group("full_attention", 0, 32), WINDOW, WINDOW], 32),
    "blocks of 16 and 32 tokens": (
        GEMMA_4,
        [Group("full_attention", 0, 16), WINDOW._replace(size=32)],
        32,
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_server_is_answered_for_by_its_events_and_its_models_folder(tmp_path, capsys, name):
    config, groups, border = SERVED[name]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    # Thirty prompts of 512 tokens, more than the engine or a small host keeps, three times.
    requests = [
        TraceRequest(at * 10**9, 512, 1, np.arange(32, dtype=np.uint32) + at % 30 * 32)
        for at in range(90)
    ]
    recorder = Recorder(tmp_path / "heard.jsonl")
    engine = HybridEngine(200, 16, groups)
    for batch in engine.batches(requests):
        recorder.batch(batch)
    recorder.close()
    shape = folder_shape(tmp_path)
    # At most the bytes of a prompt with a resume point.
    prompt = 8 * shape.block_bytes(64, 0) + 2 * shape.block_bytes(64, 1)
    given = ["advise", str(tmp_path / "heard.jsonl"), "--model", str(tmp_path), "--json"]
    given += ["--gpu", f"{4 * prompt}B", "--disk", "0", "--policy", "lru", "--host"]
    found = []
    for count in (8, 40):
        assert main([*given, f"{count * prompt}B"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["block_tokens"], len(answer["groups"])) == (border, len(groups) - 1)
        found += [(row["gpu"], row["found"]) for row in answer["rows"]]
    assert not any(engine.hits[60:])
    assert found[0] == (0, 0)
    assert found[1] == (0, pytest.approx(1, abs=0.1))
