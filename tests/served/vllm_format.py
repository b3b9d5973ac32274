"""Servers whose tiers keep KV in another format: bytes, answers, refusals, and a changed format."""

from __future__ import annotations

import json
import os

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions go to the workers

import numpy as np
import pytest
import servers
import torch
from servers import BLOCK, prompt, same, serve
from transformers import LlamaForCausalLM
from vllm import SamplingParams

from kvtrie.engines.transformers.calibration import calibrate, document
from kvtrie.engines.vllm import start_line
from kvtrie.engines.vllm.metrics import MetricsExporter
from kvtrie.engines.vllm.scheduler import SchedulerConnector
from kvtrie.errors import ConfigError

PROMPTS = [prompt(seed, 200) for seed in range(3)]
WHOLE = 3 * 6 * BLOCK
PLAIN = 4 * 2 * BLOCK * 2 * 32 * 4  # bytes of a block in float32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def calibration(model, tmp_path_factory):
    loaded = LlamaForCausalLM.from_pretrained(model)
    prompts = [torch.tensor([list(each)]) for each in PROMPTS]
    costs = calibrate(loaded, prompts, block_tokens=BLOCK)
    path = tmp_path_factory.mktemp("calibrated") / "calibration.json"
    path.write_text(json.dumps(document(loaded, costs, prompts, block_tokens=BLOCK)))
    return path


@pytest.fixture(scope="module")
def wanted(model):
    with serve(model) as server:
        return server.answers(PROMPTS)


def host(format_="int8", **more):
    return {"tiers": [{"kind": "host", "blocks": 64, "format": format_}], **more}


def kl_of(right, got):
    """Mean KL of the first answered token, over the tokens that both name and all others as one."""
    return np.mean([one_kl(mine, other) for mine, other in zip(right, got, strict=True)])


def one_kl(mine, other):
    both = sorted(mine.keys() & other.keys())
    p, q = (np.exp([each[token] for token in both]) for each in (mine, other))
    p, q = (np.append(each, max(1 - each.sum(), 1e-9)) for each in (p, q))
    return float((p * np.log(p / q)).sum())


def chances(server, prompts):
    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=20, detokenize=False)
    outputs = server.llm.generate(
        [{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False
    )
    server.found = sum(output.num_cached_tokens or 0 for output in outputs)
    return [
        {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        for output in outputs
    ]


@pytest.mark.parametrize("layerwise", [False, True])
def test_int8_blocks_come_back_close_to_native_ones(model, calibration, layerwise):
    settings = host(calibration=str(calibration), max_kl=0.01, use_layerwise=layerwise)
    measured = json.loads(calibration.read_text())["formats"]["int8"]["kl_mean"]
    with serve(model, settings) as server:
        right = chances(server, PROMPTS)
        assert server.found == 0
        server.wait_for_stores()
        block = server.worker.host.unit_bytes * 4
        assert block == PLAIN * (32 + 4) // (32 * 4)
        assert block / (PLAIN // 2) == pytest.approx(0.5625)  # heads of 32; .531 for heads of 64
        server.forget()
        kl = kl_of(right, chances(server, PROMPTS))
        assert server.found == WHOLE
        assert 0 < kl < 20 * measured + 1e-4
        (figure,) = server.kv_scheduler.format_costs
        assert figure.kl_mean == measured
        server.check()


def test_answers_of_int8_are_those_of_native_tiers(model, wanted):
    with serve(model, host(uncalibrated=True)) as server:
        server.answers(PROMPTS)
        server.wait_for_stores()
        server.forget()
        got = server.answers(PROMPTS)
        assert server.found == WHOLE
        for (tokens, likely), (right, chance) in zip(got, wanted, strict=True):
            assert tokens[0] == right[0]
            assert abs(likely[0] - chance[0]) < 0.1
        server.check()


@pytest.mark.since("0.32")
@pytest.mark.parametrize(
    ("made", "more", "least"),
    # Answers in bfloat16 may be equal.
    [(servers.tiny_gemma4, {}, 1e-9), (servers.tiny_qwen, servers.STATES, 0)],
)
def test_groups_with_kv_have_the_format_and_states_stay(made, more, least, tmp_path):
    tiers = [{"kind": "host", "bytes": "64MB", "format": "int8"}]
    folder, prompts = made(tmp_path), [prompt(seed, 620) for seed in range(3)]
    with serve(folder, {"tiers": tiers, "uncalibrated": True}, **more) as server:
        right = chances(server, prompts)
        server.wait_for_stores()
        kinds = [pool.layout.dtype for pool in server.worker.host.groups if not pool.state]
        assert set(kinds) == {"int8"}
        server.forget()
        kl = kl_of(right, chances(server, prompts))
        block = server.core.scheduler.block_size
        assert server.found == 3 * (619 // block * block)
        assert least <= kl < 0.01
        server.check()


def pool_of(_worker):
    """The format of a worker's host memory, and its bytes of a block."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    host = get_kv_transfer_group()._worker.host
    return host.layout.dtype, host.unit_bytes * host.layers


def test_each_tensor_parallel_rank_keeps_its_part_in_the_format(
    model, calibration, tmp_path, wanted
):
    settings = host(calibration=str(calibration), max_kl=0.01)
    settings["tiers"].append({"kind": "disk", "blocks": 64, "path": str(tmp_path / "kv")})
    for again in range(2):
        with serve(model, settings, tensor_parallel_size=2) as server:
            ask = server.core.model_executor.collective_rpc
            assert ask(pool_of) == [("int8", PLAIN // 2 * (32 + 4) // (32 * 4))] * 2
            for _ in range(2):
                got = server.answers(PROMPTS)
                server.wait_for_stores()
                server.forget()
                for (tokens, likely), (right, chance) in zip(got, wanted, strict=True):
                    assert tokens[0] == right[0]
                    assert abs(likely[0] - chance[0]) < 0.1
            assert server.found == WHOLE
            counters = server.kv_scheduler.cache.counters.tokens
            assert (counters["disk"] > 0) == bool(again)
            server.check()


def test_the_format_and_its_cost_are_logged_exported_and_explained(model, calibration, monkeypatch):
    measured = json.loads(calibration.read_text())["formats"]["int8"]
    cost = measured["kl_mean"]
    settings = host(calibration=str(calibration), max_kl=0.01, why_clients=True)
    logged = []
    monkeypatch.setattr(start_line._LOG, "log", lambda _, line, *more: logged.append(line % more))
    with serve(model, settings) as server:
        said = f"is in int8, 0.562 of bfloat16's bytes: mean KL of next tokens {cost:.2e} nats"
        assert said in logged[0]
        server.answers(PROMPTS)
        server.wait_for_stores()
        gauges = server.kv_scheduler.counts(MetricsExporter())["gauges"]
        assert gauges["vllm:kvtrie_format_kl_nats"] == {"int8": cost}
        sampling = SamplingParams(
            max_tokens=1,
            detokenize=False,
            extra_args={"kv_transfer_params": {"kvtrie": {"why": True}}},
        )
        asked = [{"prompt_token_ids": PROMPTS[0]}]
        (output,) = server.llm.generate(asked, sampling, use_tqdm=False)
        about = output.kv_transfer_params["kvtrie"]
        wanted = {"name": "int8", "kl_mean": cost, "tokens": measured["tokens"]}
        assert about["format"] == wanted
        server.check()


def test_without_a_calibration_of_these_weights_a_format_is_refused(model, calibration, tmp_path):
    made = json.loads(calibration.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(made | {"checkpoint": "00" * 32}))
    computed = tmp_path / "computed.json"
    computed.write_text(json.dumps(made | {"native_last": 64}))
    first = tmp_path / "first.json"
    first.write_text(json.dumps(made | {"native_first": 64}))
    for settings, message in (
        (host(), "has no calibration"),
        (host(calibration=str(first)), "native_first is 0: set it to at least 64"),
        (host(calibration=str(other)), "is of weights 0000000000000000"),
        (host(calibration=str(computed)), "native_last is 0: set it to at least 64"),
        (host("int4", calibration=str(calibration), max_kl=1e-9), "above max_kl 1.00e-09"),
        (host(calibration=str(tmp_path / "none")), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message), serve(model, settings):
            pass


def test_tokens_at_the_end_are_computed(model):
    with serve(model, host("int4", uncalibrated=True, native_last=64)) as server:
        server.answers(PROMPTS)
        server.wait_for_stores()
        server.forget()
        server.answers(PROMPTS)
        assert server.found == 3 * 4 * BLOCK  # of 200 tokens, 136 may be loaded
        server.check()


def kv_of(server, tables):
    """K and V of every layer in the slots of each prompt's whole blocks."""
    slots = torch.tensor([table[: 200 // BLOCK] for table in tables])
    parts = [part for layer in server.worker.gpu._parts for part in layer]
    return torch.stack([part[slots].flatten(2) for part in parts])


@pytest.mark.parametrize("layerwise", [False, True])
def test_blocks_of_the_first_tokens_stay_native_on_host_and_disk(
    model, tmp_path, monkeypatch, layerwise
):
    admit, tables = SchedulerConnector.admit, []

    def noting(self, request, by_group, loaded):
        tables.append(list(by_group[0]))
        return admit(self, request, by_group, loaded)

    monkeypatch.setattr(SchedulerConnector, "admit", noting)
    settings = host(
        "int4", uncalibrated=True, native_first=64, native_last=64, use_layerwise=layerwise
    )
    settings["tiers"].append({"kind": "disk", "blocks": 256, "path": str(tmp_path / "kv")})
    right = []
    for again in range(2):
        with serve(model, settings) as server:
            for _ in range(2):
                tables.clear()
                server.answers(PROMPTS, tokens=1)
                right.append(kv_of(server, tables))
                server.wait_for_stores()
                server.forget()
            # Of 200 tokens 136 may be loaded: two native blocks and two in int4.
            assert server.found == 3 * 4 * BLOCK
            assert (server.kv_scheduler.cache.counters.tokens["disk"] > 0) == bool(again)
            assert sum(server.kv_scheduler.why.tokens.values()) >= 3 * 200 - 3 * 4 * BLOCK
            server.check()
    computed, *loaded = right
    for found in loaded:
        assert torch.equal(found[:, :, :2], computed[:, :, :2])
        away = (found - computed)[:, :, 2:4].abs().amax(dim=(0, 1, 3))
        assert (away > 0).all()
        assert (away < computed.abs().max() / 4).all()
    other = settings | {"native_first": 32}
    with serve(model, other) as server:
        server.answers(PROMPTS, tokens=1)
        assert server.found == 0
        server.check()


@pytest.mark.parametrize(("above", "below"), [("native", "int8"), ("int8", "int4")])
def test_a_disk_keeps_fewer_bits_than_host_memory(model, calibration, tmp_path, above, below):
    measured = json.loads(calibration.read_text())["formats"][below]["kl_mean"]
    settings = host(above, calibration=str(calibration), max_kl=1)
    settings["tiers"].append(
        {"kind": "disk", "blocks": 64, "path": str(tmp_path / "kv"), "format": below}
    )
    right = []
    for again in range(2):
        with serve(model, settings) as server:
            right.append(chances(server, PROMPTS))
            assert server.found == again * WHOLE
            server.wait_for_stores()
            assert server.worker.disk.store.layer_bytes < server.worker.host.unit_bytes
            names = [figure.format for figure in server.kv_scheduler.format_costs]
            assert names == [one for one in (above, below) if one != "native"]
            server.check()
    assert 0 < kl_of(*right) < 20 * measured + 1e-4


def test_a_disk_of_another_format_is_a_miss(model, wanted, tmp_path):
    disk = {"kind": "disk", "blocks": 64, "path": str(tmp_path / "kv")}
    for format_, found in (("native", 0), ("int8", 0), ("int8", WHOLE)):
        settings = host(format_, uncalibrated=True)
        settings["tiers"].append(disk)
        with serve(model, settings) as server:
            got = server.answers(PROMPTS)
            if not found:
                same(got, wanted)
            assert server.found == found
            server.wait_for_stores()
            server.check()
