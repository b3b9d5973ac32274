"""Servers of models with windows and states answer as without us, whatever tier KV comes from."""

from __future__ import annotations

import random

import pytest
import servers
from servers import BLOCK, prompt, same, serve

HOST = {"tiers": [{"kind": "host", "bytes": "64MB"}]}
STATES = {"dtype": "bfloat16", "block_size": None, "max_model_len": 2560}
STATE_BLOCK = 384  # tokens: vLLM makes a page of KV as large as a state


def disk(folder, host=HOST["tiers"][0]["bytes"]):
    row = {"kind": "disk", "bytes": "256MB", "path": str(folder)}
    return {"tiers": [{"kind": "host", "bytes": host}, row]}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return servers.tiny_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return servers.tiny_qwen(tmp_path_factory.mktemp("qwen"))


def borders(block, counts):
    """Lengths around the ends of blocks, and the tokens of each that a repeat finds."""
    lengths = [count * block + more for count in counts for more in (-1, 0, 1)]
    return [(length, (length - 1) // block * block) for length in lengths]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_windows_come_back_at_every_border(gemma, tmp_path, tier):
    cases = borders(BLOCK, (1, 2, 5, 9))
    prompts = [prompt(seed, length) for seed, (length, _) in enumerate(cases)]
    with serve(gemma) as server:
        wanted = [server.answers([each], tokens=20)[0] for each in prompts]
    # With a disk, host memory is too small for more than a prompt.
    extra = HOST if tier == "host" else disk(tmp_path, "800KB")
    with serve(gemma, extra) as server:
        assert len(server.core.scheduler.connector._model.groups) == 2
        for each, right in zip(prompts, wanted, strict=True):
            same(server.answers([each], tokens=20), [right])
            server.settle()
        for _ in range(2):
            for each, right, (_, found) in zip(prompts, wanted, cases, strict=True):
                server.forget()
                same(server.answers([each], tokens=20), [right])
                assert server.found == found
                server.settle()
        assert server.kv_scheduler.cache.counters.tokens[tier] > 0
        server.check()
    if tier == "disk":
        with serve(gemma, extra) as server:
            same(server.answers(prompts, tokens=20), wanted)
            assert server.kv_scheduler.cache.counters.tokens["disk"] > 0
            server.check()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_states_come_back_bit_for_bit(qwen, tmp_path, tier):
    """Compared with vLLM's own hit at the same border: a cold run may differ in bfloat16."""
    cases = [*borders(STATE_BLOCK, (1, 2)), (1200, 1152), (2200, 1920)]
    prompts = [prompt(seed, length) for seed, (length, _) in enumerate(cases)]
    with serve(qwen, blocks=60, **STATES) as server:
        own = []
        for each, (_, found) in zip(prompts, cases, strict=True):
            server.answers([each])
            own += server.answers([each], tokens=20)
            assert server.found == found
    with serve(qwen, HOST if tier == "host" else disk(tmp_path, "2.5MB"), **STATES) as server:
        assert server.core.scheduler.block_size == STATE_BLOCK
        for each in prompts:
            server.answers([each])
            server.settle()
        for _ in range(2):
            for each, right, (_, found) in zip(prompts, own, cases, strict=True):
                server.forget()
                assert server.answers([each], tokens=20) == [right]
                assert server.found == found
                server.settle()
        assert server.kv_scheduler.cache.counters.tokens[tier] > 0
        server.check()


def test_host_hits_after_a_shared_prefix_are_never_zero(gemma):
    first = prompt(0, 300)
    prompts = [first, first[:200] + prompt(1, 100), first[:200] + prompt(2, 100)]
    with serve(gemma) as server:
        wanted = [server.answers([each], tokens=20)[0] for each in prompts]
    with serve(gemma, HOST) as server:
        for each, right in zip(prompts, wanted, strict=True):
            server.forget()
            same(server.answers([each], tokens=20), [right])
            server.settle()
            assert server.found == (0 if each is first else 200 // BLOCK * BLOCK)
        server.check()


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_that_share_around_a_border(gemma, more):
    first = prompt(0, 3 * BLOCK)
    second = first[: BLOCK + more] + prompt(1, 70)
    with serve(gemma) as server:
        (wanted,) = server.answers([second], tokens=20)
    with serve(gemma, HOST) as server:
        server.answers([first])
        server.settle()
        server.forget()
        same(server.answers([second], tokens=20), [wanted])
        assert server.found == (0 if more < 0 else BLOCK)
        server.check()


def test_a_lost_state_shows(qwen):
    """The comparison of the tests above sees a state that was not loaded."""
    first = prompt(0, 900)
    with serve(qwen, HOST, **STATES) as server:
        server.answers([first])
        server.settle()
        server.forget()
        (right,) = server.answers([first], tokens=20)
        server.settle()
        for pool in server.worker.host.groups:
            if pool.state:
                pool.planes[0].view(-1)[:] = 0
        server.forget()
        (wrong,) = server.answers([first], tokens=20)
        assert server.found == 2 * STATE_BLOCK
        assert wrong != right


@pytest.mark.parametrize(("asynchronous", "batched"), [(False, 96), (True, 96), (True, None)])
def test_requests_that_come_and_are_aborted_at_random(gemma, tmp_path, asynchronous, batched):
    """Chunks, few blocks, preemption, aborts at any step: what ends by itself is right."""
    from vllm import SamplingParams

    draw = random.Random(1)
    stems = [prompt(seed, 250) for seed in range(3)]
    prompts = [
        stem[: draw.randrange(60, 250)] + prompt(at, 70) for at, stem in enumerate(stems * 3)
    ]
    more = {"async_scheduling": asynchronous}
    if batched:
        more |= {"max_num_batched_tokens": batched, "enable_chunked_prefill": True}
    with serve(gemma, **more) as server:
        wanted = [server.answers([each], tokens=40)[0] for each in prompts]
    sampling = SamplingParams(max_tokens=40, temperature=0, logprobs=1, detokenize=False)
    with serve(gemma, disk(tmp_path, "1MB"), blocks=44, **more) as server:
        engine, running, ended = server.llm.llm_engine, {}, 0
        for step in range(300):
            if len(running) < 6 and step < 260:
                which = draw.randrange(len(prompts))
                engine.add_request(f"{step}", {"prompt_token_ids": prompts[which]}, sampling)
                running[f"{step}"] = which
            if running and draw.random() < 0.06:
                name = draw.choice(list(running))
                engine.abort_request([name])
                del running[name]
            if draw.random() < 0.05:
                server.llm.reset_prefix_cache()
            for output in engine.step():
                if output.finished and output.request_id in running:
                    same([servers.answer(output)], [wanted[running.pop(output.request_id)]])
                    ended += 1
            if step % 20 == 0:
                server.kv_scheduler.manager.audit()
        while engine.has_unfinished_requests():
            engine.step()
        tokens = server.kv_scheduler.cache.counters.tokens
        assert ended > 12
        assert tokens["host"] + tokens["disk"] > 0
        server.check()
