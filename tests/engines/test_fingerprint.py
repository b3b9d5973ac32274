"""The name of a model's weights: KV of models that differ in anything never matches."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvtrie import BlockManager, Index, ModelShape, Tier
from kvtrie.engines.identity import fingerprint as module
from kvtrie.engines.transformers import KvtrieCache, fingerprint
from kvtrie.errors import ConfigError
from kvtrie.tiers import DiskStorage, open_pools
from kvtrie.transfer import Executor

pytestmark = pytest.mark.engine

BLOCK = 8
IDS = torch.arange(1, 41)[None]
RULES = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 16,
    },
}


def made(seed=0, **how):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "float32",
        "eos_token_id": None,
        "bos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | how))).eval()


def opened(name, folder=None):
    shape = ModelShape.from_config(made().config, fingerprint=name)
    tiers = [Tier("gpu", blocks=16)]
    tiers += [] if folder is None else [Tier("disk", blocks=16, path=str(folder))]
    manager = BlockManager(shape, tiers, block_tokens=BLOCK)
    return Executor(manager, open_pools(shape, tiers, BLOCK), workers=0)


def run(model, executor):
    """One pass over what is missing; how many tokens were found."""
    with torch.no_grad(), KvtrieCache(model, executor, IDS) as cache:
        past = cache.get_seq_length()
        model(IDS[:, past:], past_key_values=cache)
        return past


def key(model):
    return model.model.layers[0].self_attn.k_proj.weight


def by_adding(model):
    with torch.no_grad():
        key(model)[3, 5] += 1


def by_data(model):
    key(model).data = key(model).data + torch.eye(16, 32)


def by_replacing(model):
    attention = model.model.layers[0].self_attn
    weight = attention.k_proj.weight.detach().clone()
    weight[0, 0] += 1
    del attention.k_proj.weight  # so that the new one may take its place in memory
    attention.k_proj.weight = torch.nn.Parameter(weight)


def by_loading(model):
    model.load_state_dict(made(1).state_dict())


def by_learning(model):
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def by_a_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.01)


def by_a_layer(model):
    model.model.layers[0] = made(1).model.layers[0]


def by_order(model):
    first, second = model.model.layers
    model.model.layers[0], model.model.layers[1] = second, first
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = at


def rounded_to_half(model):
    model.half().float()


def by_an_adapter(model):
    """As PEFT's layers say it; an adapter's scaling is no tensor."""
    model.model.layers[0].self_attn.k_proj.merged_adapters = []
    model.model.layers[0].self_attn.k_proj.scaling = {"mine": 2.0}


CHANGES = [
    by_adding,
    by_data,
    by_replacing,
    by_loading,
    by_learning,
    by_a_buffer,
    by_a_layer,
    by_order,
    rounded_to_half,
    by_an_adapter,
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_gives_another_name(change):
    model = made()
    before = fingerprint(model)
    change(model)
    assert fingerprint(model) != before
    assert fingerprint(model) == fingerprint(model)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("_active_adapter", ["a", "b"]),
        ("_disable_adapters", True),
        ("merged_adapters", ["a"]),
        ("scaling", {"a": 1.0}),
    ],
)
def test_adapters_that_are_set_otherwise_give_another_name(name, other):
    model = made()
    layer = model.model.layers[1].mlp.up_proj
    layer.merged_adapters, layer._active_adapter = [], ["a"]
    layer._disable_adapters, layer.scaling = False, {"a": 0.5}
    before = fingerprint(model)
    was = getattr(layer, name)
    setattr(layer, name, other)
    assert fingerprint(model) != before
    setattr(layer, name, was)
    assert fingerprint(model) == before


@settings(max_examples=20)
@given(st.data())
def test_one_bit_of_one_tensor_gives_another_name(data):
    model = made()
    before = fingerprint(model)
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        bits = data.draw(st.sampled_from(tensors)).view(torch.int32).view(-1)
        at = data.draw(st.integers(0, len(bits) - 1))
        flip = 1 << data.draw(st.integers(0, 30))
        bits[at] ^= flip
        assert fingerprint(model) != before
        bits[at] ^= flip
        assert fingerprint(model) == before


def test_the_settings_of_rope_are_part_of_the_name():
    names = {
        fingerprint(made(rope_parameters={"rope_type": "default", "rope_theta": theta}))
        for theta in (1e4, 5e4)
    }
    names |= {
        fingerprint(made(rope_parameters={"rope_type": "linear", "factor": f, "rope_theta": 1e4}))
        for f in (1.0, 2.0)
    }
    assert len(names) == 4


@pytest.mark.parametrize("rule", RULES)
def test_what_a_model_has_seen_changes_no_name(rule):
    """Frequencies of some rules follow the length of the last pass."""
    parameters = {"rope_type": rule, "rope_theta": 1e4, **RULES[rule]}
    model = made(rope_parameters=parameters, max_position_embeddings=32)
    rotary = model.model.rotary_emb
    before, frequencies = fingerprint(model), rotary.inv_freq.clone()
    with torch.no_grad():
        model(torch.cat([IDS, IDS], 1))
    assert not torch.equal(rotary.inv_freq, frequencies)
    assert fingerprint(model) == before
    rotary.original_inv_freq.mul_(2)
    assert fingerprint(model) != before


def test_a_model_that_was_saved_and_loaded_keeps_its_name(tmp_path):
    model = made()
    model.save_pretrained(tmp_path)
    assert fingerprint(LlamaForCausalLM.from_pretrained(tmp_path)) == fingerprint(model)
    assert fingerprint(made()) == fingerprint(model)
    assert fingerprint(made(1)) != fingerprint(model)


def test_weights_are_read_once_and_a_model_can_be_collected(monkeypatch):
    read = []
    digest = module._digest
    monkeypatch.setattr(module, "_digest", lambda *what: read.append(what) or digest(*what))
    model = made()
    name = fingerprint(model)
    count = len(read)
    assert count == len([*model.parameters(), *model.buffers()])
    with torch.no_grad():
        model(IDS)
        model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert fingerprint(model) == name
    assert len(read) == count
    executor = opened("")
    run(model, executor)
    refs = weakref.ref(model), weakref.ref(executor.manager)
    read.clear()
    del model, executor
    gc.collect()
    assert [one() for one in refs] == [None, None]


def test_tensors_of_inference_mode_are_read_every_time():
    with torch.inference_mode():
        model = made()
        before = fingerprint(model)
        assert fingerprint(model) == before
        key(model)[0, 0] += 1
        assert fingerprint(model) != before


def test_weights_that_cannot_be_read_are_refused():
    with torch.device("meta"):
        model = made()
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight .*on meta\) cannot be read"):
        fingerprint(model)


@pytest.mark.parametrize(
    ("named", "change"),
    [
        pytest.param(named, change, marks=[] if quick else [pytest.mark.deep])
        for named in (True, False)
        for change in CHANGES
        for quick in [change in (by_adding, by_an_adapter) and not named]
    ],
)
def test_in_memory_models_that_differ_never_match(named, change):
    """Neither another model object nor the same one after a change, within a pass or before."""
    model, other = made(), made()
    executor = opened(fingerprint(model) if named else "")
    assert run(model, executor) == 0
    assert run(other, executor) == 32  # the same weights in another object
    change(other)
    with pytest.raises(ConfigError, match="other weights, adapters or RoPE"):
        KvtrieCache(other, executor, IDS)
    with KvtrieCache(model, executor, IDS) as cache:
        change(model)
        with torch.no_grad(), pytest.raises(ConfigError, match="other weights, adapters or RoPE"):
            model(IDS[:, 32:], past_key_values=cache)
        assert cache.leases[0].tokens == 32
    assert executor.manager.stats().leases == 0
    assert run(made(), executor) == 32
    executor.manager.audit()


def test_on_disk_models_that_differ_never_match(tmp_path):
    for change, found in [(None, 0), (by_adding, 0), (by_an_adapter, 0), (None, 32)]:
        model = made()
        if change is not None:
            change(model)
        with opened(fingerprint(model), tmp_path) as executor:
            executor.restore()
            assert run(model, executor) == found
            executor.save()
            executor.pools[1].close()


def test_what_another_process_may_read_wants_a_name(tmp_path):
    named = ModelShape(layers=2, kv_heads=1, head_dim=4, fingerprint="named")
    shape = replace(named, fingerprint="")
    gpu, host = Tier("gpu", blocks=4), Tier("host", blocks=4)
    memory = BlockManager(shape, [gpu, Tier("disk", blocks=4)], block_tokens=4)
    BlockManager(shape, [gpu, host, Tier("remote", blocks=4, owner="none")])  # no bytes
    disk = Tier("disk", blocks=4, path=str(tmp_path / "kv"))
    bad = {
        "disk": lambda: BlockManager(shape, [gpu, disk]),
        "remote": lambda: BlockManager(shape, [gpu, host, Tier("remote", blocks=4)]),
        "disk folder": lambda: DiskStorage(tmp_path / "kv", shape, 4, 4),
        "disk folder ": lambda: open_pools(shape, [gpu, disk], 4),
        "the index": lambda: memory.index(now=1),
        "the index ": lambda: memory.load_index(Index(), now=1),
    }
    for what, call in bad.items():
        with pytest.raises(ConfigError, match=f"{what.strip()}.*give the ModelShape a finger"):
            call()
    assert not (tmp_path / "kv").exists()
    assert BlockManager(named, [gpu, host]).index(now=1) is not None
