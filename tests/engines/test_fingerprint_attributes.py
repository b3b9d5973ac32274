"""What changes KV and is no tensor: numbers, functions, settings; each gives another name."""

import functools
import os
import subprocess
import sys
import types

import pytest
import torch
from test_fingerprint import IDS, made, opened, run
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from kvtrie.engines.identity import model_fields
from kvtrie.engines.identity.model_state import ModelCache, ModelState
from kvtrie.engines.transformers import Decoder, KvtrieCache, fingerprint
from kvtrie.errors import ConfigError

pytestmark = pytest.mark.engine

FACTOR = 2.0
HALF = types.ModuleType("half_of_a_patch")
HALF.factor = 2.0


def rope(model, _):
    model.model.rotary_emb.attention_scaling = 1.7


def softmax(model, _):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


def epsilon(model, _):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def an_integer_becomes_a_float(model, _):
    model.model.layers[0].mlp.hidden_size = float(model.model.layers[0].mlp.hidden_size)


def a_new_attribute(model, _):
    model.model.layers[0].self_attn.temperature = "high"


def forward_of_an_instance(model, _):
    inner = model.model.layers[0].mlp
    usual = inner.forward
    inner.forward = lambda hidden: usual(hidden) * 2


def forward_that_keeps_the_name(model, _):
    inner = model.model.layers[0].mlp
    usual = inner.forward
    inner.forward = functools.wraps(usual)(lambda hidden: usual(hidden) * 2)


def forward_of_a_class(_, patch):
    usual = LlamaMLP.forward
    patch.setattr(LlamaMLP, "forward", lambda self, hidden: usual(self, hidden) * 2)


def forward_of_a_class_that_keeps_the_name(_, patch):
    usual = LlamaMLP.forward
    twice = functools.wraps(usual)(lambda self, hidden: usual(self, hidden) * 2)
    patch.setattr(LlamaMLP, "forward", twice)


def forward_of_another_class_of_the_package(_, patch):
    patch.setattr(LlamaMLP, "forward", torch.nn.Identity.forward)


def forward_with_a_global(model, _):
    model.model.layers[0].mlp.forward = lambda hidden: hidden * FACTOR


def a_function_of_the_file(_, patch):
    usual = modeling_llama.apply_rotary_pos_emb
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *a: [2 * x for x in usual(*a)])


def a_function_of_torch(_, patch):
    usual = torch.nn.functional.linear
    patch.setattr(torch.nn.functional, "silu", lambda *a: 2 * usual(*a))


def a_number_of_a_class(_, patch):
    patch.setattr(LlamaAttention, "is_causal", 0, raising=False)


def call_of_all_modules(_, patch):
    usual = torch.nn.Module.__call__
    patch.setattr(torch.nn.Module, "__call__", lambda self, *a: 2 * usual(self, *a))


def an_activation(model, _):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def the_class_of_a_module(model, _):
    model.model.layers[0].mlp.__class__ = type("Other", (LlamaMLP,), {"factor": 2})


def a_number_of_the_configuration(model, _):
    model.config.rms_norm_eps = 0.5


def rope_of_the_configuration(model, _):
    model.config.rope_parameters["rope_theta"] = 5.0


def the_kind_of_attention(model, _):
    model.config._attn_implementation = "eager"


def an_attention_of_the_user(_, patch):
    mapping = AttentionInterface._global_mapping
    patch.setitem(mapping, "sdpa", modeling_llama.eager_attention_forward)


def the_type_of_a_tensor(model, _):
    model.model.layers[0].mlp.double()


CHANGES = [
    rope,
    softmax,
    epsilon,
    an_integer_becomes_a_float,
    a_new_attribute,
    forward_of_an_instance,
    forward_that_keeps_the_name,
    forward_of_a_class,
    forward_of_a_class_that_keeps_the_name,
    forward_of_another_class_of_the_package,
    forward_with_a_global,
    a_function_of_the_file,
    a_function_of_torch,
    a_number_of_a_class,
    call_of_all_modules,
    an_activation,
    the_class_of_a_module,
    a_number_of_the_configuration,
    rope_of_the_configuration,
    the_kind_of_attention,
    an_attention_of_the_user,
    the_type_of_a_tensor,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_another_name_which_its_undoing_takes_back(change, monkeypatch):
    model = made()
    before, state = fingerprint(model), ModelState.of(model)
    known = ModelCache()
    known.put(model, 1)
    with monkeypatch.context() as patch:
        change(model, patch)
        assert not ModelState.of(model).same(state)
        assert known.get(model) is None
        after = fingerprint(model)
        assert after != before
        assert fingerprint(model) == after
        other = made()
        change(other, patch)
        assert fingerprint(other) != before
    assert fingerprint(made()) == before


FUNCTIONS = [rope, softmax, epsilon, forward_of_an_instance, forward_of_a_class]


@pytest.mark.parametrize("change", FUNCTIONS)
def test_kv_of_a_model_before_a_change_is_not_found_after_it(change, tmp_path, monkeypatch):
    model = made()
    with opened(fingerprint(model), tmp_path) as executor:
        assert run(model, executor) == 0
        with monkeypatch.context() as patch, KvtrieCache(model, executor, IDS) as cache:
            change(model, patch)
            with torch.no_grad(), pytest.raises(ConfigError, match="other attributes or functions"):
                model(IDS[:, 32:], past_key_values=cache)
        executor.save()
        executor.pools[1].close()
    for changed, found in ((True, 0), (False, 32)):
        with monkeypatch.context() as patch:
            model = made()
            if changed:
                change(model, patch)
            with opened(fingerprint(model), tmp_path) as executor:
                executor.restore()
                assert run(model, executor) == found
                executor.pools[1].close()


def test_what_a_function_of_the_user_reads_is_part_of_the_name(monkeypatch):
    factor = 2.0

    def double(hidden, *, by=3.0):
        return hidden * factor * by * FACTOR * HALF.factor

    model = made()
    model.model.layers[0].mlp.forward = double
    names = {fingerprint(model)}
    factor = 4.0
    names.add(fingerprint(model))
    double.__kwdefaults__ = {"by": 5.0}
    names.add(fingerprint(model))
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    names.add(fingerprint(model))
    monkeypatch.setattr(HALF, "factor", 9.0)
    names.add(fingerprint(model))
    double.__code__ = (lambda hidden, *, by: hidden + factor + by + FACTOR).__code__
    names.add(fingerprint(model))
    assert len(names) == 6


def test_a_value_without_an_encoding_is_refused():
    model = made()
    model.model.layers[1].self_attn.steering = object()
    with pytest.raises(
        ConfigError, match=r"layers\.1\.self_attn\.steering.* of type builtins\.obj"
    ):
        fingerprint(model)
    model, thing = made(), object()
    model.model.layers[1].mlp.forward = lambda hidden: (hidden, thing)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.forward.*closure.* no canonical"):
        fingerprint(model)


@pytest.mark.parametrize("name", [*model_fields.TORCH_MODULE_FIELDS, *model_fields.MODULES])
def test_a_listed_attribute_changes_no_name(name):
    model = made()
    if name in ("_modules", "_parameters", "_buffers"):
        return
    before = fingerprint(model)
    layer = model.model.layers[0]
    hooks = name in model_fields.TORCH_MODULE_FIELDS and "hooks" in name
    vars(layer)[name] = dict(vars(layer)[name]) if hooks else "changed"
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", model_fields.CONFIGS)
def test_a_listed_setting_changes_no_name(name):
    model = made()
    before = fingerprint(model)
    vars(model.config)[name] = "changed"
    assert fingerprint(model) == before


@pytest.mark.parametrize("name", sorted(vars(made().config)))
def test_every_other_setting_changes_the_name(name):
    if name in model_fields.CONFIGS:
        return
    model = made()
    before = fingerprint(model)
    vars(model.config)[name] = ["changed", vars(model.config)[name]]
    if name == "_attn_implementation_internal":
        vars(model.config)[name] = "flex_attention"
    assert fingerprint(model) != before


NAME = """
import sys
sys.path.insert(0, {folder!r})
from test_fingerprint import made
from test_fingerprint_attributes import forward_of_an_instance, forward_with_a_global
from kvtrie.engines.transformers import fingerprint
model = made()
print(fingerprint(model))
forward_of_an_instance(model, None)
forward_with_a_global(model, None)
print(fingerprint(model))
"""


def test_two_processes_and_a_loaded_model_have_one_name(tmp_path, request):
    model = made()
    model.save_pretrained(tmp_path)
    names = [fingerprint(LlamaForCausalLM.from_pretrained(tmp_path))]
    forward_of_an_instance(model, None)
    forward_with_a_global(model, None)
    names.append(fingerprint(model))
    out = subprocess.run(
        [sys.executable, "-c", NAME.format(folder=str(request.path.parent))],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split("\n")[:2] == names


def test_a_decoder_forgets_what_it_found_out_about_a_model_that_changed():
    model = made(num_hidden_layers=3)
    decoder = Decoder(model)
    length = 20
    before = decoder.ropes(length)[0]
    model.model.rotary_emb.inv_freq.mul_(0.5)
    decoder.identity()
    after = decoder.ropes(length)[0]
    assert not torch.equal(before.cos, after.cos)
    model.model.layers = model.model.layers[:2].eval()
    decoder.identity()
    assert decoder.layers == 2
    assert len(decoder.ropes(length)) == 2
