"""Servers of models with windows and states answer as without us, whatever tier KV comes from."""

from __future__ import annotations

import random

import pytest
import servers
from servers import BLOCK, STATES, hybrid, prompt, same, serve

pytestmark = pytest.mark.since("0.32")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return servers.tiny_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    return servers.tiny_gemma4(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def wide_windows(tmp_path_factory):
    """Gemma 4 the other way round: blocks of its windows have half the tokens."""
    return servers.tiny_gemma4(tmp_path_factory.mktemp("windows"), window=64, full=32)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return servers.tiny_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def llama4(tmp_path_factory):
    return servers.tiny_llama4(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return servers.tiny_qwen(tmp_path_factory.mktemp("qwen"))


def borders(block, counts):
    """Lengths around the ends of blocks, and the tokens of each that a repeat finds."""
    lengths = [count * block + more for count in counts for more in (-1, 0, 1)]
    return [(length, (length - 1) // block * block) for length in lengths]


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("gemma", "host"),
        ("gemma", "disk"),
        ("gemma4", "host"),
        ("gemma4", "disk"),
        ("wide_windows", "disk"),
        ("gpt_oss", "disk"),
        ("llama4", "disk"),
    ],
)
def test_windows_come_back_at_every_border(kind, tier, tmp_path, request):
    model = request.getfixturevalue(kind)
    with serve(model) as server:
        block = server.core.scheduler.block_size
        cases = borders(block, (1, 2, 5, 9))
        prompts = [prompt(seed, length) for seed, (length, _) in enumerate(cases)]
        wanted = [server.answers([each], tokens=20)[0] for each in prompts]
    # With a disk, host memory is too small for more than a prompt.
    extra = hybrid() if tier == "host" else hybrid(tmp_path, f"{25 * block}KB")
    with serve(model, extra) as server:
        assert len(server.core.scheduler.connector._model.groups) == 2
        for each, right in zip(prompts, wanted, strict=True):
            same(server.answers([each], tokens=20), [right])
            server.wait_for_stores()
        for _ in range(2):
            for each, right, (_, found) in zip(prompts, wanted, cases, strict=True):
                server.forget()
                same(server.answers([each], tokens=20), [right])
                assert server.found == found
                server.wait_for_stores()
        assert server.kv_scheduler.cache.counters.tokens[tier] > 0
        server.check()
    if tier == "disk":
        with serve(model, extra) as server:
            same(server.answers(prompts, tokens=20), wanted)
            assert server.kv_scheduler.cache.counters.tokens["disk"] > 0
            server.check()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_states_come_back_bit_for_bit(qwen, tmp_path, tier):
    """Compared with vLLM's own hit at the same border: a cold run may differ in bfloat16."""
    with serve(qwen, blocks=60, **STATES) as server:
        block, own = server.core.scheduler.block_size, []
        cases = [*borders(block, (1, 2)), (2200, 2199 // block * block)]
        prompts = [prompt(seed, length) for seed, (length, _) in enumerate(cases)]
        for each, (_, found) in zip(prompts, cases, strict=True):
            server.answers([each])
            own += server.answers([each], tokens=20)
            assert server.found == found
    extra = hybrid() if tier == "host" else hybrid(tmp_path, "4MB")
    with serve(qwen, extra, **STATES) as server:
        assert server.core.scheduler.block_size == block
        for each in prompts:
            server.answers([each])
            server.wait_for_stores()
        for _ in range(2):
            for each, right, (_, found) in zip(prompts, own, cases, strict=True):
                server.forget()
                assert server.answers([each], tokens=20) == [right]
                assert server.found == found
                server.wait_for_stores()
        assert server.kv_scheduler.cache.counters.tokens[tier] > 0
        server.check()


@pytest.mark.parametrize("kind", ["gemma", "gemma4", "qwen"])
def test_another_server_finds_all_groups_in_a_shared_store(kind, tmp_path, request):
    """Compared with vLLM's own hit at the same border."""
    model, more = request.getfixturevalue(kind), STATES if kind == "qwen" else {}
    extra = hybrid()
    extra["tiers"].append({"kind": "remote", "path": f"folder:{tmp_path / 'kv'}"})
    extra |= {"deadline_s": 60.0, "lookup_s": 60.0}
    with serve(model, extra, **more) as server:
        block, own = server.core.scheduler.block_size, []
        cases = borders(block, (1, 3))
        prompts = [prompt(seed, length) for seed, (length, _) in enumerate(cases)]
        for each in prompts:
            server.answers([each])
            own += server.answers([each], tokens=20)
            server.wait_for_stores()
        assert server.kv_scheduler.cache.counters.tokens["remote"] == 0
    with serve(model, extra, **more) as server:
        for each, right, (_, found) in zip(prompts, own, cases, strict=True):
            same(server.answers([each], tokens=20), [right])
            assert server.found == found
            server.wait_for_stores()
        tokens = server.kv_scheduler.cache.counters.tokens
        assert tokens["remote"] == sum(found for _, found in cases)
        server.check()


@pytest.mark.parametrize("kind", ["gemma", "gemma4", "wide_windows"])
def test_host_hits_after_a_shared_prefix_are_never_zero(kind, request):
    model = request.getfixturevalue(kind)
    first = prompt(0, 300)
    prompts = [first, first[:200] + prompt(1, 100), first[:200] + prompt(2, 100)]
    with serve(model) as server:
        wanted = [server.answers([each], tokens=20)[0] for each in prompts]
    with serve(model, hybrid()) as server:
        for each, right in zip(prompts, wanted, strict=True):
            server.forget()
            same(server.answers([each], tokens=20), [right])
            server.wait_for_stores()
            assert server.found == (
                0
                if each is first
                else 200 // server.core.scheduler.block_size * server.core.scheduler.block_size
            )
        server.check()


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_that_share_around_a_border(gemma, more):
    first = prompt(0, 3 * BLOCK)
    second = first[: BLOCK + more] + prompt(1, 70)
    with serve(gemma) as server:
        (wanted,) = server.answers([second], tokens=20)
    with serve(gemma, hybrid()) as server:
        server.answers([first])
        server.wait_for_stores()
        server.forget()
        same(server.answers([second], tokens=20), [wanted])
        assert server.found == (0 if more < 0 else BLOCK)
        server.check()


def test_a_lost_state_shows(qwen):
    """The comparison of the tests above sees a state that was not loaded."""
    first = prompt(0, 900)
    with serve(qwen, hybrid(), **STATES) as server:
        block = server.core.scheduler.block_size
        server.answers([first])
        server.wait_for_stores()
        server.forget()
        (right,) = server.answers([first], tokens=20)
        server.wait_for_stores()
        for pool in server.worker.host.groups:
            if pool.state:
                pool.planes[0].view(-1)[:] = 0
        server.forget()
        (wrong,) = server.answers([first], tokens=20)
        assert server.found == 899 // block * block > 0
        assert wrong != right


@pytest.mark.parametrize(
    ("kind", "asynchronous", "batched"),
    [
        ("gemma", False, 96),
        ("gemma", True, 96),
        ("gemma", True, None),
        ("gemma4", True, 96),
        ("wide_windows", True, 96),
    ],
)
def test_requests_that_come_and_are_aborted_at_random(
    kind, tmp_path, request, asynchronous, batched
):
    """Chunks, few blocks, preemption, aborts at any step: what ends by itself is right."""
    from vllm import SamplingParams

    model, draw = request.getfixturevalue(kind), random.Random(1)
    stems = [prompt(seed, 250) for seed in range(3)]
    prompts = [
        stem[: draw.randrange(60, 250)] + prompt(at, 70) for at, stem in enumerate(stems * 3)
    ]
    more = {"async_scheduling": asynchronous}
    if batched:
        more |= {"max_num_batched_tokens": batched, "enable_chunked_prefill": True}
    with serve(model, **more) as server:
        wanted = [server.answers([each], tokens=40)[0] for each in prompts]
    sampling = SamplingParams(max_tokens=40, temperature=0, logprobs=1, detokenize=False)
    with serve(model, hybrid(tmp_path, "1MB"), blocks=44, **more) as server:
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


@pytest.mark.parametrize("requests", [320, pytest.param(10_000, marks=pytest.mark.deep)])
def test_many_requests_at_once(gemma, tmp_path, requests):
    """Waves of 64 over few blocks of vLLM's, whose cache is emptied after each of them."""
    draw = random.Random(0)
    stems = [prompt(seed, 300) for seed in range(8)]
    prompts = [
        draw.choice(stems)[: draw.randrange(300)] + prompt(100 + at, draw.randrange(1, 60))
        for at in range(requests // 5)
    ]
    more = {"max_num_seqs": 64, "blocks": 640}
    with serve(gemma, **more) as server:
        wanted = server.answers(prompts)
    with serve(gemma, hybrid(tmp_path, "6MB"), **more) as server:
        for _ in range(-(-requests // 64)):
            wave = draw.choices(range(len(prompts)), k=64)
            same(server.answers([prompts[at] for at in wave]), [wanted[at] for at in wave])
            server.forget()
        tokens = server.kv_scheduler.cache.counters.tokens
        assert min(tokens["host"], tokens["disk"]) > requests
        server.check()


def test_preemption_under_pressure(gemma, tmp_path, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def note(self, request, *args, **more):
        preempted.append(request.request_id)
        return preempt(self, request, *args, **more)

    prompts = [prompt(seed, 190 + 10 * seed) for seed in range(6)]
    with serve(gemma) as server:
        wanted = [server.answers([each], tokens=60)[0] for each in prompts]
    monkeypatch.setattr(Scheduler, "_preempt_request", note)
    with serve(gemma, hybrid(tmp_path, "1MB"), blocks=50) as server:
        for _ in range(3):
            same(server.answers(prompts, tokens=60), wanted)
            server.wait_for_stores()
        assert preempted
        server.check()


def test_blocks_of_steps_that_verify_drafts(gemma, monkeypatch):
    """A next turn finds the windows that drafts, accepted and rejected, have passed over."""
    from kvtrie.engines.vllm.scheduler import SchedulerConnector

    plan, drafted = SchedulerConnector.orders, []

    def orders(self, output):
        drafted.extend(output.scheduled_spec_decode_tokens.values())
        return plan(self, output)

    first = [prompt(seed, 20) * 4 + prompt(9 + seed, 3 + seed) for seed in range(6)]
    with serve(gemma) as server:
        wanted = [server.answers([each], tokens=90)[0] for each in first]
        turns = [each + right[0][:80] for each, right in zip(first, wanted, strict=True)]
        after = [server.answers([each])[0] for each in turns]
    monkeypatch.setattr(SchedulerConnector, "orders", orders)
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with serve(gemma, hybrid(), speculative_config=guess) as server:
        for _ in range(2):
            same(server.answers(first, tokens=90), wanted)
            server.wait_for_stores()
            server.forget()
            same(server.answers(turns), after)
            assert server.found >= sum(len(each) - 2 * BLOCK for each in turns)
            server.wait_for_stores()
            server.forget()
        assert sum(map(len, drafted)) > 100
        server.check()
