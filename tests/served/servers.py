"""vLLM servers in this process, over a tiny model made on the spot, with kvtrie and without.

One process per server would show the same and take a minute each. The model's weights are drawn
wide, so that a wrong block shows in the next token.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

VOCABULARY, BLOCK, HIDDEN = 512, 32, 128
STATES = {"dtype": "bfloat16", "block_size": None, "max_model_len": 2560}  # of models with states


_TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.15,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "dtype": "float32",
}


def written(kind, config, folder):
    """Write a random model, and its name."""
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    return str(folder)


def tiny_llama(folder):
    """Llama of four layers."""
    config = LlamaConfig(**_TINY, num_key_value_heads=2, head_dim=32)
    return written(LlamaForCausalLM, config, folder)


def tiny_gemma(folder, windows=1, **more):
    """Gemma of layers that attend to the last 64 tokens, `windows` to each one that sees all.

    Args:
        folder: for the model.
        windows: layers with a window before each of full attention; of four or six layers in all.
        more: further fields of the configuration.
    """
    types = ["sliding_attention"] * windows + ["full_attention"]
    types *= max(1, 4 // len(types))
    config = Gemma3TextConfig(
        **_TINY | {"num_hidden_layers": len(types)} | more,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=types,
    )
    return written(Gemma3ForCausalLM, config, folder)


def tiny_gpt_oss(folder):
    """Four layers with sinks and experts, two of which attend to the last 64 tokens."""
    config = GptOssConfig(
        **_TINY,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return written(GptOssForCausalLM, config, folder)


def tiny_gemma4(folder, window=32, full=64):
    """Four layers; heads of two with a window and of two without differ in width.

    A block of the wider ones has half the tokens.
    """
    config = Gemma4TextConfig(
        **_TINY,
        num_key_value_heads=2,
        head_dim=window,
        global_head_dim=full,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
        sliding_window=80,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return written(Gemma4ForCausalLM, config, folder)


def tiny_llama4(folder):
    """Four layers with experts, two of which attend to chunks of 64 tokens."""
    config = Llama4TextConfig(
        **_TINY,
        intermediate_size_mlp=192,
        num_key_value_heads=2,
        head_dim=32,
        attention_chunk_size=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        layer_types=["chunked_attention", "full_attention"] * 2,
        no_rope_layers=[1, 0, 1, 0],
    )
    return written(Llama4ForCausalLM, config, folder)


def tiny_deepseek(folder, layers=4):
    """Dense layers with latent KV."""
    config = DeepseekV2Config(
        **_TINY | {"num_hidden_layers": layers},
        first_k_dense_replace=layers,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
    )
    return written(DeepseekV2ForCausalLM, config, folder)


def tiny_qwen(folder):
    """Three layers with states and one with full attention, in bfloat16."""
    config = Qwen3NextConfig(
        **_TINY | {"dtype": "bfloat16", "max_position_embeddings": 8192},
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        mlp_only_layers=[0, 1, 2],  # vLLM wants a layer with experts
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    return written(Qwen3NextForCausalLM, config, folder)


@contextmanager
def serve(model, extra=None, *, blocks=64, **more):
    """A server; with `extra` it has our connector, found by its name alone."""
    transfer = {
        "kv_connector": more.pop("connector", "KvtrieConnector"),
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": more.pop("policy", "fail"),
    }
    arguments = {
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 640,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "disable_log_stats": True,
    } | more
    # vLLM reads the attributes of all modules at start, and this one's library has none to read.
    numba = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        llm = LLM(
            model,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=blocks,
            kv_transfer_config=None if extra is None else transfer,
            **arguments,
        )
    except BaseException:
        # vLLM keeps the connector of a server that did not start, and the next one would get it.
        ensure_kv_transfer_shutdown()
        raise
    finally:
        if numba is not None:
            sys.modules["llvmlite.binding.ffi"] = numba
    try:
        yield Server(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def hybrid(folder=None, host="64MB"):
    """Tiers in bytes, as models with several groups have them."""
    rows = [{"kind": "host", "bytes": host}]
    if folder is not None:
        rows.append({"kind": "disk", "bytes": "256MB", "path": str(folder)})
    return {"tiers": rows}


def offloading(folder=None, chunks=16, **more):
    """Settings of vLLM's OffloadingConnector with our spec, over a disk if there is a folder."""
    extra = {
        "spec_name": "KvtrieOffloadingSpec",
        "spec_module_path": "kvtrie.engines.vllm.offloading",
        "cpu_bytes_to_use": chunks * 65536,
    }
    if folder is not None:
        extra["disk"] = {"path": str(folder), "blocks": 256}
    return extra | more


@contextmanager
def offload(model, extra, **more):
    """A server with vLLM's own OffloadingConnector."""
    with serve(model, extra, connector="OffloadingConnector", **more) as server:
        tiers = server.core.scheduler.connector.connector_scheduler.manager.secondary_tiers
        server.disk = getattr(next(iter(tiers), None), "disk", None)
        yield server


class Server:
    """A running vLLM server with the calls that tests make."""

    def __init__(self, llm):
        self.llm = llm
        self.core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self.lora = None

    @property
    def kv_scheduler(self):
        return self.core.scheduler.connector.scheduler

    @property
    def worker(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def answers(self, prompts, tokens=8, *, salt=None, **more):
        """For each prompt its tokens and their log-probabilities."""
        salted = {} if salt is None else {"cache_salt": salt}
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, logprobs=1, detokenize=False, **more
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": each} | salted for each in prompts],
            sampling,
            use_tqdm=False,
            lora_request=self.lora,
        )
        self.found = sum(output.num_cached_tokens or 0 for output in outputs)
        return [answer(output) for output in outputs]

    def wait_for_stores(self):
        """Step on until every store has ended, as a server in a separate process does."""
        for _ in range(5000):
            if not self.kv_scheduler.busy:
                return
            self.llm.llm_engine.step()
        raise AssertionError(f"{self.kv_scheduler.cache.moves.dispatch.pending} moves do not end")

    def forget(self):
        """Empty vLLM's own cache, so that what is found is ours."""
        assert self.llm.reset_prefix_cache()

    def check(self):
        """Nothing is held, nothing is under way, and the books are right."""
        self.wait_for_stores()
        stats = self.kv_scheduler.manager.stats()
        assert (stats.leases, stats.moves) == (0, 0)
        self.kv_scheduler.manager.audit()


def answer(output):
    one = output.outputs[0]
    chances = [max(each.logprob for each in step.values()) for step in one.logprobs]
    return list(one.token_ids), chances


def same(got, wanted):
    """Whether tokens are equal and log-probabilities as near as another batch leaves them."""
    for (tokens, chances), (right, likely) in zip(got, wanted, strict=True):
        assert tokens == right
        assert np.allclose(chances, likely, atol=2e-3)


def prompt(seed, tokens, *, after=()):
    """A prompt of random tokens, after the tokens of `after`."""
    drawn = np.random.default_rng(seed).integers(1, VOCABULARY, tokens)
    return [*after, *drawn.tolist()]
