"""Uses of a cache that transformers documents: copies, compiled models, text without images."""

import copy

import pytest
import torch
from tinymodels import COMMON, answer, serve, some
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
)

from kvtrie.engines.transformers import KvtrieCache
from kvtrie.errors import ClosedError, ConfigError

pytestmark = pytest.mark.engine

TEXT = COMMON | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE = 210


def llava():
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**EYES),
        text_config=LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def gemma3():
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**EYES),
        text_config=Gemma3TextConfig(**TEXT, sliding_window=16),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    return Gemma3ForConditionalGeneration(config)


def mistral3():
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**EYES),
        text_config=MistralConfig(**TEXT),
        image_token_index=IMAGE,
    )
    return Mistral3ForConditionalGeneration(config)


def qwen25vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
        vision_start_token_id=IMAGE - 2,
        vision_end_token_id=IMAGE - 3,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


@pytest.mark.parametrize("make", [llava, gemma3, mistral3, qwen25vl])
def test_text_is_served_by_a_model_that_also_takes_images(make):
    torch.manual_seed(0)
    model = make().eval()
    ids = some(1, 1, 30).clamp(max=200)
    truth = answer(model, ids).sequences
    executor = serve(model)
    for past in (0, 24):
        with KvtrieCache(model, executor, ids) as cache:
            assert cache.get_seq_length() == past
            processed = {"mm_token_type_ids": torch.zeros_like(ids)} if make is qwen25vl else {}
            mine = answer(model, ids, cache, **processed)
            assert torch.equal(mine.sequences, truth)


def test_an_image_is_refused_by_the_name_that_the_user_gave():
    torch.manual_seed(0)
    model = llava().eval()
    ids = torch.cat([some(1, 1, 9), torch.full((1, 4), IMAGE), some(2, 1, 9)], 1)
    with KvtrieCache(model, serve(model), ids) as cache:
        with pytest.raises(ConfigError, match=r"without pixel_values$"):
            answer(model, ids, cache, pixel_values=torch.randn(1, 3, 16, 16))
        assert cache.leases[0].tokens == 0


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy])
def test_a_copy_forks_and_each_is_closed_by_itself(llama, how):
    executor = serve(llama)
    prompt = some(1, 2, 20)
    with KvtrieCache(llama, executor, prompt) as cache:
        with torch.no_grad():
            llama(prompt, past_key_values=cache)
        for seed in (5, 6, 5):
            ids = torch.cat([prompt, some(seed, 2, 7)], 1)
            mine = how(cache)
            assert torch.equal(answer(llama, ids, mine).sequences, answer(llama, ids).sequences)
            assert cache.get_seq_length() == prompt.shape[1]
            mine.close()
            with pytest.raises(ClosedError):
                answer(llama, ids, mine)
        ids = torch.cat([prompt, some(7, 2, 7)], 1)
        left = how(cache)
    assert torch.equal(answer(llama, ids, left).sequences, answer(llama, ids).sequences)
    del left
    assert executor.manager.stats().leases == 0
    executor.manager.audit()


@pytest.mark.deep
def test_a_compiled_forward_answers_as_without_a_cache():
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, **(COMMON | {"num_hidden_layers": 2}))
    model = LlamaForCausalLM(config).eval()
    ids = some(1, 1, 45)
    truth = answer(model, ids, steps=4).sequences
    model.forward = torch.compile(model.forward, dynamic=True, backend="eager")
    executor = serve(model)
    for past in (0, 40):
        with KvtrieCache(model, executor, ids) as cache:
            assert cache.get_seq_length() == past
            assert torch.equal(answer(model, ids, cache, steps=4).sequences, truth)
