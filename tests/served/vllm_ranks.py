"""Servers of two workers: tensor-parallel ranks, and pipeline stages with their own layers."""

from __future__ import annotations

import os

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to the workers

import pytest
import servers
import torch
from servers import BLOCK, prompt, same

from kvtrie.errors import ConfigError

PROMPTS = [prompt(seed, 200) for seed in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model):
    """Answers of a server of one worker without us."""
    with servers.serve(model) as server:
        return server.answers(PROMPTS)


def ready(worker):
    """Unless it compiles, vLLM's runner for CPUs has no room for what an earlier stage sends."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )


def layers(_worker):
    """The number of layers that a worker keeps, and whether it has a disk."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    return worker.gpu.layers, worker.disk is not None


@pytest.mark.parametrize("by", ["tensor", "pipeline"])
def test_two_workers_answer_as_one(model, wanted, tmp_path, by):
    extra = {
        "tiers": [
            {"kind": "host", "blocks": 24},
            {"kind": "disk", "blocks": 64, "path": str(tmp_path)},
        ]
    }
    for again in range(2):
        with servers.serve(model, extra, **{f"{by}_parallel_size": 2}) as server:
            ask = server.core.model_executor.collective_rpc
            if by == "pipeline":
                ask(ready)
            assert ask(layers) == [(2 if by == "pipeline" else 4, True)] * 2
            assert (server.kv_scheduler.manager.stats().blocks >= 3 * 6) == bool(again)
            same(server.answers(PROMPTS), wanted)
            server.wait_for_stores()
            server.forget()
            same(server.answers(PROMPTS), wanted)
            counters = server.kv_scheduler.cache.counters.tokens
            assert counters["host"] + counters["disk"] >= (3 + 3 * again) * 6 * BLOCK
            server.check()


@pytest.mark.since("0.32")
@pytest.mark.parametrize("by", ["tensor", "pipeline"])
def test_two_workers_hold_windows(tmp_path, by):
    model = servers.tiny_gemma(tmp_path / "gemma")
    with servers.serve(model) as server:
        wanted = [server.answers([each], tokens=20)[0] for each in PROMPTS]
    for again in range(2):
        # Host memory is too small for more than a prompt.
        with servers.serve(
            model, servers.hybrid(tmp_path / "kv", "600KB"), **{f"{by}_parallel_size": 2}
        ) as server:
            ask = server.core.model_executor.collective_rpc
            if by == "pipeline":
                ask(ready)
            assert ask(layers) == [(1 if by == "pipeline" else 2, True)] * 2  # of the first group
            assert (server.kv_scheduler.manager.stats().blocks >= 3 * 6) == bool(again)
            for _ in range(2):
                for each, right in zip(PROMPTS, wanted, strict=True):
                    same(server.answers([each], tokens=20), [right])
                    server.wait_for_stores()
                server.forget()
            assert server.found == 6 * BLOCK
            assert server.kv_scheduler.cache.counters.tokens["disk"] > 0
            server.check()


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="with AMX, vLLM takes a kernel that can begin there"
)
def test_a_kernel_that_cannot_begin_amid_a_prompt_is_refused(tmp_path):
    """vLLM's plain kernel for latent KV on CPUs gives wrong answers after a prefix hit."""
    model = servers.tiny_deepseek(tmp_path)
    extra = {"tiers": [{"kind": "host", "blocks": 16}]}
    with pytest.raises(ConfigError, match="prefix caching is off"), servers.serve(model, extra):
        pass
