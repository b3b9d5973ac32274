"""Hooks on the model: what they change is no token, so hooks of others are refused by name."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tinymodels import COMMON, answer, serve, some
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM

from kvtrie.engines.transformers import Decoder, KvtrieCache
from kvtrie.errors import ConfigError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT asks transformers by an old name
    pytest.mark.filterwarnings("ignore:Position ids are not supported"),
]

IDS = some(1, 1, 24)


def small():
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, **(COMMON | {"num_hidden_layers": 2}))
    return LlamaForCausalLM(config).eval()


def steer(module, args, out=None):  # noqa: ARG001 - as torch calls it
    return None


def steer_with_kwargs(module, args, kwargs, out=None):  # noqa: ARG001
    return None


KINDS = {
    "forward": lambda part: part.register_forward_hook(steer),
    "forward with kwargs": lambda part: part.register_forward_hook(
        steer_with_kwargs, with_kwargs=True
    ),
    "pre": lambda part: part.register_forward_pre_hook(steer),
    "pre with kwargs": lambda part: part.register_forward_pre_hook(
        partial(steer_with_kwargs), with_kwargs=True
    ),
    "global": lambda _: register_module_forward_hook(steer),
    "global pre": lambda _: register_module_forward_pre_hook(steer),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_hook_is_refused_by_the_module_it_is_on(kind):
    model = small()
    executor = serve(model)
    decoder = Decoder(model)
    where = "all modules" if "global" in kind else r"'model\.layers\.1\.self_attn\.k_proj'"
    why = f"{where}.*the forward hook steer.* of test_hooks"
    with KvtrieCache(model, executor, IDS) as cache:
        handle = KINDS[kind](model.model.layers[1].self_attn.k_proj)
        try:
            with torch.no_grad(), pytest.raises(ConfigError, match=why):
                model(IDS, past_key_values=cache)
            assert cache.leases[0].tokens == 0
            with pytest.raises(ConfigError, match=why):
                KvtrieCache(model, executor, IDS)
            with pytest.raises(ConfigError, match=why):
                Decoder(model)
            with pytest.raises(ConfigError, match=why):
                decoder.identity()
        finally:
            handle.remove()
        answer(model, IDS, cache)
    executor.manager.audit()


def test_hooks_that_follow_from_weights_are_served():
    model = small()
    prune.random_unstructured(model.model.layers[0].self_attn.v_proj, "weight", 0.3)  # a pre-hook
    with torch.no_grad():
        model(IDS, output_hidden_states=True)  # transformers leaves hooks that capture
    model.enable_input_require_grads()
    assert model.model.layers[0]._forward_hooks
    truth = answer(model, IDS)
    executor = serve(model)
    for past in (0, 16):
        with KvtrieCache(model, executor, IDS) as cache:
            assert cache.get_seq_length() == past
            assert torch.equal(answer(model, IDS, cache).sequences, truth.sequences)


def adapted(**more):
    settings = partial(
        LoraConfig, r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False, **more
    )
    model = get_peft_model(small(), settings(), adapter_name="one")
    model.add_adapter("two", settings())
    model.set_adapter("one")
    return model.eval()


@pytest.mark.parametrize("names", [["two"], ["one", "two"], ["__base__", "two"]])
def test_a_batch_of_several_adapters_is_refused_and_leaves_the_model_as_it_was(names):
    model = adapted()
    given = {"input_ids": IDS, "max_new_tokens": 4, "do_sample": False}
    truth = model.generate(**given)
    executor = serve(model)
    with KvtrieCache(model, executor, IDS) as cache:
        ids = IDS.repeat(len(names), 1)
        with pytest.raises(ConfigError, match=r"_adapter_names_pre_forward_hook.*set_adapter"):
            model.generate(
                **(given | {"input_ids": ids}), adapter_names=names, past_key_values=cache
            )
        assert cache.leases[0].tokens == 0
    assert torch.equal(model.generate(**given), truth)
    with KvtrieCache(model, executor, IDS) as cache:
        assert torch.equal(model.generate(**given, past_key_values=cache), truth)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_peft_model_is_served_by_whichever_wrapper_is_called(task):
    model = adapted(task_type=task)
    given = {"input_ids": IDS, "max_new_tokens": 4, "do_sample": False}
    truth = model.generate(**given)
    for called in (model, model.base_model.model):
        executor = serve(called)
        for past in (0, 16):
            with KvtrieCache(called, executor, IDS) as cache:
                assert cache.get_seq_length() == past
                assert torch.equal(called.generate(**given, past_key_values=cache), truth)
        with torch.no_grad(), KvtrieCache(called, executor, IDS) as cache:
            mine = called(input_ids=IDS[:, 16:], past_key_values=cache).logits[0, -1]
        assert int(mine.argmax()) == int(truth[0, IDS.shape[1]])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (PrefixTuningConfig, "another one in its place, as prefix tuning does"),
        (PromptTuningConfig, "K and V of 5 tokens where 2 were given: prompt tuning"),
    ],
)
def test_learned_prompts_are_refused_by_what_they_do(settings, why):
    model = get_peft_model(small(), settings(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(ConfigError, match=why):
        KvtrieCache(model, serve(model), IDS)
