"""The KV that a vLLM server has, read from vLLM's configuration, and models that are refused."""

from types import SimpleNamespace

import pytest
import torch

from kvtrie.engines.vllm.model import ServedModel
from kvtrie.engines.vllm.settings import Settings
from kvtrie.errors import ConfigError


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class SlidingWindowMLASpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class CrossAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


PAGE = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": "torch.bfloat16",
    "page_size_bytes": 32 * 2 * 2 * 64 * 2,
}
STATE = {
    "block_size": 32,
    "shapes": ((3, 4), (8,)),
    "dtypes": (torch.bfloat16, torch.float32),
    "mamba_cache_mode": "align",
}


def of(*specs, pp=1, ranks=None, caching=True, drafts=(), blocks=100):
    """The model whose groups have these specs, of one to three layers."""
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec, layer_names=["a", "b", "c"][: 3 - at], is_eagle_group=at in drafts
        )
        for at, spec in enumerate(specs)
    ]
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2, pipeline_parallel_size=pp, **(ranks or {})
        ),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(hidden_size=256)),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    caches = SimpleNamespace(kv_cache_groups=groups, num_blocks=blocks)
    return ServedModel.of(config, caches, name_weights=False)


def served(spec=FullAttentionSpec, *, pp=1, ranks=None, caching=True, **more):
    return of(spec(**PAGE | more), pp=pp, ranks=ranks, caching=caching)


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
    assert (model.stages, model.ranks, model.replicated, model.shape.layers) == (3, 6, False, 3)
    latent = served(MLAAttentionSpec, num_kv_heads=1, head_size=96, page_size_bytes=32 * 96 * 2)
    assert (latent.replicated, latent.shape.latent, latent.ranks) == (True, True, 2)
    # Pages of bytes are addressed like latent ones, and differ from rank to rank.
    assert not served(dtype="torch.uint8", page_size_bytes=32 * 300).replicated


def test_groups_are_those_of_vllm_with_full_attention_first():
    window = SlidingWindowSpec(**PAGE, sliding_window=48)
    draft = FullAttentionSpec(**PAGE)
    model = of(window, FullAttentionSpec(**PAGE), MambaSpec(**STATE), draft, drafts=[3])
    assert [group.number for group in model.groups] == [1, 0, 2]
    assert [group.state for group in model.groups] == [False, False, True]
    assert (model.block_tokens, model.layer_names) == (32, ("a", "b", "a", "b", "c", "a"))
    full, sliding, state = model.shape.groups
    assert (full.kind, full.layers) == ("full", (0, 1))
    assert (sliding.kind, sliding.layers, sliding.window) == ("sliding", (2, 3, 4), 48)
    assert (state.kind, state.layers, state.state_bytes) == ("state", (5,), 3 * 4 * 2 + 8 * 4)
    assert model.shape.layer_bytes(32, 1) == PAGE["page_size_bytes"]
    # Where groups share memory the gaps between blocks are left out.
    padded = SlidingWindowSpec(
        **PAGE | {"page_size_bytes": 1 << 20},
        sliding_window=48,
        page_size_padded=1 << 20,
        real_page_size_bytes=PAGE["page_size_bytes"],
    )
    assert of(FullAttentionSpec(**PAGE), padded).shape.layer_bytes(32, 1) == PAGE["page_size_bytes"]


def test_a_block_is_a_whole_number_of_blocks_of_every_group():
    half = PAGE | {"block_size": 16, "page_size_bytes": PAGE["page_size_bytes"] // 2}
    window = SlidingWindowSpec(**half, sliding_window=48, extra_retained_tokens=3)
    draft = FullAttentionSpec(**PAGE | {"block_size": 96})
    model = of(FullAttentionSpec(**PAGE), window, draft, drafts=[2])
    assert model.block_tokens == 96, "vLLM promises hits that its drafts can go on from as well"
    assert [group.pages for group in model.groups] == [3, 6]
    assert model.shape.layer_bytes(96, 0) == 3 * PAGE["page_size_bytes"]
    assert model.shape.layer_bytes(96, 1) == 6 * half["page_size_bytes"]
    assert model.shape.groups[1].window == 51


def test_rows_that_hold_several_tokens():
    """As in DeepSeek-V4: rows of 584 bytes for 4 tokens, and a window whose blocks are shorter."""
    row = {"num_kv_heads": 1, "head_size": 584, "dtype": "torch.uint8"}
    packed = {"block_size": 256, "tokens_per_state": 4, "page_size_bytes": 64 * 584}
    plain = {"block_size": 64, "tokens_per_state": 1, "page_size_bytes": 64 * 584}
    window = SlidingWindowMLASpec(**row, **plain, sliding_window=128)
    model = of(MLAAttentionSpec(**row, **packed), window)
    assert (model.block_tokens, [group.pages for group in model.groups]) == (256, [1, 4])
    assert [group.tokens_per_row for group in model.shape.groups] == [4, 1]
    assert model.shape.layer_bytes(256, 0) == 64 * 584
    assert model.shape.layer_bytes(256, 1) == 256 * 584


def test_groups_in_which_vllm_finds_nothing_are_left_to_it():
    scratch = CrossAttentionSpec(**PAGE, prefix_cacheable=False)
    assert len(of(FullAttentionSpec(**PAGE), scratch).groups) == 1


def test_what_cannot_be_served_is_refused():
    with pytest.raises(ConfigError, match=r"in 1 groups \(MambaSpec\)"):
        of(MambaSpec(**STATE))
    with pytest.raises(ConfigError, match="group 1 of the model's layers has vLLM's CrossAtt"):
        of(FullAttentionSpec(**PAGE), CrossAttentionSpec(**PAGE))
    with pytest.raises(ConfigError, match="group 1 keeps states in vLLM's mode 'all'"):
        of(FullAttentionSpec(**PAGE), MambaSpec(**STATE | {"mamba_cache_mode": "all"}))
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2"):
        served(ranks={"decode_context_parallel_size": 2})
    with pytest.raises(ConfigError, match="prefix caching is off"):
        served(caching=False)


def test_a_memory_below_a_block_and_a_resume_point_is_refused():
    window = SlidingWindowSpec(**PAGE, sliding_window=48)
    several, settings = (FullAttentionSpec(**PAGE), window, window), Settings()
    with pytest.raises(ConfigError, match=r"memory has 3 blocks, .* of 3 groups of layers want 4"):
        of(*several, blocks=3).require_served(settings)
    of(*several, blocks=4).require_served(settings)
    of(FullAttentionSpec(**PAGE), blocks=1).require_served(settings)


def test_vllms_hashes_of_a_block_are_those_of_its_shortest_group():
    half = PAGE | {"block_size": 16, "page_size_bytes": PAGE["page_size_bytes"] // 2}
    assert served().hashes == 1
    model = of(FullAttentionSpec(**PAGE), SlidingWindowSpec(**half, sliding_window=48))
    assert (model.block_tokens, model.hashes) == (32, 2)
