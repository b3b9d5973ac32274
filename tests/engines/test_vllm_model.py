"""The KV that a vLLM server has, read from vLLM's configuration, and models that are refused."""

from types import SimpleNamespace

import pytest

from kvtrie.engines.vllm.model import ServedModel, window_cost
from kvtrie.errors import ConfigError


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


def served(spec=FullAttentionSpec, *, groups=1, pp=1, ranks=None, caching=True, **more):
    page = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "torch.bfloat16",
        "page_size_bytes": 32 * 2 * 2 * 64 * 2,
    } | more
    group = SimpleNamespace(kv_cache_spec=spec(**page), layer_names=["a", "b", "c"])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=pp, **(ranks or {})
        ),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(hidden_size=256)),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    caches = SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=100)
    return ServedModel.of(config, caches, name_weights=False)


def test_the_shape_is_that_of_vllms_pages():
    model = served()
    assert model.layer_names == ("a", "b", "c")
    assert (model.shape.kv_heads, model.shape.rank_heads, model.shape.hidden) == (4, 2, 256)
    assert model.shape.layer_bytes(model.block_tokens) == 32 * 2 * 2 * 64 * 2
    # A page with scales in addition to numbers is counted in bytes.
    odd = served(dtype="torch.uint8", page_size_bytes=32 * 300)
    assert odd.shape.layer_bytes(32) == 32 * 300


def test_pipeline_stages_and_latent_kv():
    model = served(pp=3)
    assert (model.stages, model.ranks, model.alike, model.shape.layers) == (3, 6, False, 3)
    latent = served(MLAAttentionSpec, num_kv_heads=1, head_size=96, page_size_bytes=32 * 96 * 2)
    assert (latent.alike, latent.shape.latent, latent.ranks) == (True, True, 2)
    # Pages of bytes are addressed like latent ones, and differ from rank to rank.
    assert not served(dtype="torch.uint8", page_size_bytes=32 * 300).alike


def test_the_cost_of_windows_is_logged():
    def cost(**more):
        return window_cost(
            SimpleNamespace(hf_text_config=SimpleNamespace(**more), max_model_len=1000)
        )

    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    text = cost(layer_types=kinds, sliding_window=100)
    assert text.startswith("3 of 4 layers attend to 100 tokens at most")
    assert text.endswith("a request of 1000 tokens takes 3.1 times the memory")  # 4000 / 1300
    kinds[0] = "chunked_attention"
    text = cost(layer_types=kinds, sliding_window=100, attention_chunk_size=300)
    assert "3 of 4 layers attend to 300 tokens at most" in text
    assert not cost()
    assert not cost(layer_types=None)
    assert not cost(layer_types=kinds, sliding_window=None, attention_chunk_size=1000)


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ConfigError, match=r"in 1 groups \(MambaSpec\)"):
        served(MambaSpec)
    with pytest.raises(ConfigError, match="in 2 groups"):
        served(groups=2)
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2"):
        served(ranks={"decode_context_parallel_size": 2})
    with pytest.raises(ConfigError, match="prefix caching is off"):
        served(caching=False)
