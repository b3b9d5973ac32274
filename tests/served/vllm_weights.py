"""KV of other weights or adapters is not found: after a restart, and after an update in place."""

from __future__ import annotations

import json
import shutil

import pytest
import servers
import torch
from safetensors.torch import load_file, save_file
from servers import BLOCK, offloading, prompt, same
from vllm.lora.request import LoRARequest

from kvtrie.errors import ConfigError

PROMPTS = [prompt(seed, 200) for seed in range(2)]
ALL = 2 * 6 * BLOCK
LAST = "model.layers.3.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


def copied(model, folder, change=None):
    """A copy of a model elsewhere, with files of the same sizes; changed if that is asked."""
    shutil.copytree(model, folder)
    if change is not None:
        file = folder / "model.safetensors"
        size, tensors = file.stat().st_size, load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        assert file.stat().st_size == size
    return str(folder)


def one_bit(tensors):
    bits = tensors[LAST].view(torch.int32).view(-1)
    bits[len(bits) // 2] ^= 1


def others(tensors):
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.copy_(tensor.flip(0))


def connected(folder):
    tiers = [{"kind": "host", "blocks": 64}, {"kind": "disk", "blocks": 256, "path": str(folder)}]
    return {"tiers": tiers}


def ask(server):
    """The tokens that were found below vLLM's memory, and the answers."""
    server.forget()
    answers = server.answers(PROMPTS)
    for _ in range(200):
        server.llm.llm_engine.step()
    return server.found, answers


def flip_a_norm(model):
    """As a trainer does that writes through `.data`, of which torch counts no change."""
    weight = dict(model.named_parameters())["model.layers.1.input_layernorm.weight"]
    weight.data.view(torch.int32)[7] ^= 1


def nothing(model):
    return type(model).__name__


def test_the_connector_over_restarts_and_updates(model, tmp_path):
    kv = connected(tmp_path / "kv")
    changed = copied(model, tmp_path / "changed", others)
    with servers.serve(changed) as server:
        _, right = ask(server)
    with servers.serve(model, kv) as server:
        assert ask(server)[0] == 0
    with servers.serve(copied(model, tmp_path / "bit", one_bit), kv) as server:
        assert ask(server)[0] == 0
    with servers.serve(copied(model, tmp_path / "elsewhere"), kv) as server:
        found, before = ask(server)
        assert found == ALL
        # A call that changes nothing costs nothing that was kept.
        server.llm.apply_model(nothing)
        assert ask(server) == (ALL, before)
        server.llm.apply_model(flip_a_norm)
        assert ask(server)[0] == 0
        assert ask(server)[0] == ALL
        server.llm.apply_model(flip_a_norm)  # back again
        assert ask(server) == (ALL, before)
        server.llm.collective_rpc("reload_weights", kwargs={"weights_path": changed})
        found, answers = ask(server)
        assert found == 0
        same(answers, right)
        found, answers = ask(server)
        assert found == ALL
        same(answers, right)
        server.check()


@pytest.mark.since("0.31")
def test_vllms_offloading_over_restarts_and_updates(model, tmp_path):
    kv = offloading(tmp_path / "kv", chunks=32)
    with servers.offload(model, kv) as server:
        assert ask(server)[0] == 0
    with servers.offload(copied(model, tmp_path / "bit", one_bit), kv) as server:
        assert ask(server)[0] == 0
    with servers.offload(copied(model, tmp_path / "elsewhere"), kv) as server:
        assert ask(server)[0] > ALL // 2
        server.llm.apply_model(nothing)
        assert ask(server)[0] == ALL
        server.llm.apply_model(flip_a_norm)
        # vLLM's host memory has KV of the weights before until vLLM resets it.
        chunks = len(server.disk)
        ask(server)
        server.answers([prompt(9, 100)])
        assert len(server.disk) == chunks
        assert server.llm.reset_prefix_cache(reset_connector=True)
        assert ask(server)[0] == 0
        assert ask(server)[0] > ALL // 2


@pytest.mark.since("0.31")
def test_a_disk_below_vllms_offloading_is_refused_with_adapters_and_other_specs(model, tmp_path):
    with (
        pytest.raises(Exception, match="use KvtrieConnector"),
        servers.offload(model, offloading(tmp_path / "kv"), enable_lora=True),
    ):
        pass
    from kvtrie.engines.vllm.disk_tier import KvtrieDiskTier

    with pytest.raises(ConfigError, match="spec_name has to be KvtrieOffloadingSpec"):
        KvtrieDiskTier(None, memoryview(bytearray(64)), "kvtrie", path=str(tmp_path), blocks=3)


def adapter(folder, seed, rank=4):
    """Save an adapter of random weights."""
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors |= {
            f"{name}.lora_A.weight": torch.randn(rank, 128),
            f"{name}.lora_B.weight": torch.randn(64, rank),
        }
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def test_an_adapter_that_is_trained_again_while_a_server_runs_and_before_it_starts(model, tmp_path):
    kv, more = connected(tmp_path / "kv"), {"enable_lora": True, "max_lora_rank": 8}
    path = adapter(tmp_path / "mine", 1)
    with servers.serve(model, kv, **more) as server:

        def answers(**loading):
            server.lora = LoRARequest("mine", 1, path, **loading)
            return ask(server)

        assert answers()[0] == 0
        found, old = answers()
        assert found == ALL
        adapter(tmp_path / "mine", 2)  # which vLLM has not read
        found, unread = answers()
        assert found == ALL
        same(unread, old)
        adapter(tmp_path / "mine", 3, rank=16)
        with pytest.raises(Exception, match="16 is greater than max_lora_rank"):
            server.llm.llm_engine.add_lora(LoRARequest("mine", 1, path, load_inplace=True))
        found, kept = answers()
        assert found == ALL  # vLLM goes on with the old adapter
        same(kept, old)
        adapter(tmp_path / "mine", 2)
        server.llm.llm_engine.add_lora(LoRARequest("mine", 1, path, load_inplace=True))
        found, new = answers()
        assert found == 0
        assert [tokens for tokens, _ in new] != [tokens for tokens, _ in old]
        assert answers()[0] == ALL
    with servers.serve(model, kv, **more | {"max_loras": 2, "max_lora_rank": 16}) as server:
        server.lora = LoRARequest("other", 7, path)
        found, again = ask(server)
        assert found == ALL
        same(again, new)
        # Trained again with a larger rank while an earlier server had the old adapter.
        server.lora = LoRARequest("mine", 8, adapter(tmp_path / "mine", 3, rank=16))
        assert ask(server)[0] == 0
        assert ask(server)[0] == ALL
