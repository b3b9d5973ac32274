"""Tokens and log-probabilities of a vLLM server with kvtrie are those of one without."""

from __future__ import annotations

import random

import pytest
import servers
from servers import BLOCK, prompt, same, serve

from kvtrie import Moves
from kvtrie.engines.vllm.scheduler import SchedulerConnector
from kvtrie.engines.vllm.worker import WorkerConnector
from kvtrie.tiers import EnginePool


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


PROMPTS = [
    prompt(0, 200),
    prompt(1, 97),
    prompt(2, 250),
    prompt(3, 70, after=prompt(0, 200)),
    prompt(4, 160),
    prompt(5, 128),
]


@pytest.fixture(scope="module")
def wanted(model):
    """Answers of a server without us."""
    with serve(model) as server:
        return server.answers(PROMPTS, tokens=40)


def short(wanted, tokens):
    return [(each[:tokens], chances[:tokens]) for each, chances in wanted]


def host(blocks=64, **more):
    return {"tiers": [{"kind": "host", "blocks": blocks}], **more}


def disk(folder, blocks=64, **more):
    return {
        "tiers": [
            {"kind": "host", "blocks": blocks},
            {"kind": "disk", "blocks": 512, "path": str(folder)},
        ],
        **more,
    }


@pytest.mark.parametrize("layerwise", [False, True])
def test_what_comes_from_host(model, wanted, layerwise):
    with serve(model, host(use_layerwise=layerwise)) as server:
        same(server.answers(PROMPTS), short(wanted, 8))
        server.wait_for_stores()
        server.forget()
        same(server.answers(PROMPTS), short(wanted, 8))
        assert server.kv_scheduler.cache.counters.tokens["host"] >= 5 * 3 * BLOCK
        server.check()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_blocks_are_stored_by_the_step_that_fills_them(model, wanted, monkeypatch, asynchronous):
    plan, save = SchedulerConnector.orders, WorkerConnector.save_layer
    before, inside, layers = [], [], set()

    def orders(self, output):
        made = plan(self, output)
        before.extend(each for each in made.moves if (Moves.from_bytes(each).src == 0).any())
        inside.extend(len(Moves.from_bytes(each)) for each in made.ahead)
        return made

    def save_layer(self, name):
        layers.add(name)
        save(self, name)

    monkeypatch.setattr(SchedulerConnector, "orders", orders)
    monkeypatch.setattr(WorkerConnector, "save_layer", save_layer)
    with serve(model, host(), async_scheduling=asynchronous) as server:
        for each, right in zip(PROMPTS[:3], wanted, strict=False):
            same(server.answers([each], tokens=1), short([right], 1))
            assert server.kv_scheduler.cache.moves.dispatch.pending == 0
            assert server.kv_scheduler.manager.stats().moves == 0
        assert (sum(inside), len(layers)) == (6 + 3 + 7, 4)
        server.wait_for_stores()
        server.forget()
        same(server.answers(PROMPTS), short(wanted, 8))
        assert server.kv_scheduler.cache.counters.tokens["host"] >= (6 + 3 + 7) * BLOCK
        server.check()
    assert before == []


def one_by_one(server, prompts, wanted):
    """Each prompt by itself, its blocks stored before the next one comes."""
    for each, right in zip(prompts, wanted, strict=True):
        same(server.answers([each]), [right])
        server.wait_for_stores()


def test_what_comes_from_disk_and_after_a_restart(model, wanted, tmp_path):
    extra, wanted = disk(tmp_path, blocks=9), short(wanted, 8)
    with serve(model, extra) as server:
        one_by_one(server, PROMPTS, wanted)
        stored = server.kv_scheduler.manager.stats().tiers["disk"].copies
        assert stored == 28
        server.forget()
        one_by_one(server, PROMPTS, wanted)
        assert server.kv_scheduler.cache.counters.tokens["disk"] >= 20 * BLOCK
        server.check()
    with serve(model, extra) as server:
        assert server.kv_scheduler.manager.stats().tiers["disk"].copies == stored
        same(server.answers(PROMPTS), wanted)
        assert server.kv_scheduler.cache.counters.tokens["disk"] >= 4 * BLOCK
        server.check()


def test_damaged_blocks_are_misses_and_fail_no_request(model, wanted, tmp_path):
    extra = disk(tmp_path)
    with serve(model, extra) as server:
        server.answers(PROMPTS)
        server.wait_for_stores()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 65536]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 3, len(data), 65536):
            data[at] ^= 1
        path.write_bytes(data)
    with serve(model, extra) as server:
        same(server.answers(PROMPTS), short(wanted, 8))
        server.check()


def test_preemption_under_pressure(model, wanted, tmp_path, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request

    def note(self, request, *args, **more):
        preempted.append(request.request_id)
        return preempt(self, request, *args, **more)

    monkeypatch.setattr(Scheduler, "_preempt_request", note)
    with serve(model, disk(tmp_path, blocks=24), blocks=21) as server:
        for _ in range(3):
            same(server.answers(PROMPTS, tokens=40), wanted)
            server.wait_for_stores()
        assert preempted
        server.check()


class BrokenError(Exception):
    """A copy that did not go."""


def test_failing_loads_are_computed_again(model, wanted, monkeypatch):
    with serve(model, host(), policy="recompute") as server:
        same(server.answers(PROMPTS), short(wanted, 8))
        server.wait_for_stores()
        server.forget()
        left, copy = [0, 1, 1, 0, 1, 1], EnginePool.copy_from

        def fail(self, *args):
            if left and left.pop():
                raise BrokenError
            copy(self, *args)

        monkeypatch.setattr(EnginePool, "copy_from", fail)
        same(server.answers(PROMPTS), short(wanted, 8))
        assert server.kv_scheduler.cache.counters.lost["a load that failed"] > 0
        monkeypatch.undo()
        server.forget()
        same(server.answers(PROMPTS), short(wanted, 8))
        server.check()


def test_a_failing_disk_fails_no_request(model, wanted, tmp_path, monkeypatch):
    with serve(model, disk(tmp_path, blocks=9)) as server:
        server.answers(PROMPTS)
        server.wait_for_stores()
        server.forget()

        def fail(rows):
            return ["no disk"] * len(rows)

        monkeypatch.setattr(server.worker.disk, "read_many", fail)
        monkeypatch.setattr(server.worker.disk, "read", fail)
        same(server.answers(PROMPTS), short(wanted, 8))
        server.check()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_that_come_and_are_aborted_at_random(model, wanted, tmp_path, asynchronous):
    """Shared prefixes, few blocks, aborts at any step: what ends by itself is right."""
    from vllm import SamplingParams

    draw = random.Random(1)
    sampling = SamplingParams(max_tokens=40, temperature=0, logprobs=1, detokenize=False)
    extra = disk(tmp_path, blocks=14)
    with serve(model, extra, blocks=21, async_scheduling=asynchronous) as server:
        engine, running, ended = server.llm.llm_engine, {}, 0
        for step in range(260):
            if len(running) < 5 and step < 220:
                which = draw.randrange(len(PROMPTS))
                name = f"{step}"
                engine.add_request(name, {"prompt_token_ids": PROMPTS[which]}, sampling)
                running[name] = which
            if running and draw.random() < 0.06:
                name = draw.choice(list(running))
                engine.abort_request([name])
                del running[name]
            if draw.random() < 0.03:
                server.llm.reset_prefix_cache()
            for output in engine.step():
                if output.finished and output.request_id in running:
                    same([servers.answer(output)], [wanted[running.pop(output.request_id)]])
                    ended += 1
            if step % 20 == 0:
                server.kv_scheduler.manager.audit()
        while engine.has_unfinished_requests():
            engine.step()
        assert ended > 12
        assert (
            server.kv_scheduler.cache.counters.tokens["host"]
            + server.kv_scheduler.cache.counters.tokens["disk"]
            > 0
        )
        server.check()


def test_salts_part_requests_and_a_reset_forgets_all_tiers(model, wanted, tmp_path):
    with serve(model, disk(tmp_path)) as server:
        prompts = [{"prompt_token_ids": PROMPTS[0], "cache_salt": salt} for salt in ("a", "b")]
        for each in prompts:
            sampling = servers.SamplingParams(max_tokens=4, temperature=0, detokenize=False)
            server.llm.generate(each, sampling, use_tqdm=False)
        assert server.kv_scheduler.cache.counters.tokens["host"] == 0
        server.wait_for_stores()
        assert server.kv_scheduler.manager.stats().blocks == 12
        assert server.core.scheduler.reset_prefix_cache(reset_connector=True)
        assert server.kv_scheduler.manager.stats().blocks == 0
        same(server.answers(PROMPTS), short(wanted, 8))
        server.check()
