"""Sleep, pause and new weights keep KV that is still true: what is found after them.

vLLM's CPU build only logs that it cannot sleep. So between sleep and wake-up a stand-in overwrites
the KV in vLLM's memory with NaN, and at level 2 the weights, which it then loads again.
"""

from __future__ import annotations

import random

import pytest
import servers
import torch
from servers import BLOCK, prompt, same
from vllm import SamplingParams

PROMPTS = [prompt(seed, 200) for seed in range(4)]
ALL = 4 * 6 * BLOCK
CALLS = ["serve", "serve", "serve", "sleep", "sleep", "update", "pause", "reset"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


def tiers(folder, host=64, **more):
    disk = {"kind": "disk", "blocks": 256, "path": str(folder)}
    return {"tiers": [{"kind": "host", "blocks": host}, disk], **more}


def norms(model):
    """The weights that updates change: no kernel packs them."""
    return [each for name, each in model.named_parameters() if "layernorm" in name]


class Weights:
    """Updates in place, as a trainer makes them, and the stand-in of a sleep."""

    def __init__(self, server):
        self.server, self.saved = server, []

    @property
    def runner(self):
        return self.server.core.model_executor.driver_worker.worker.model_runner

    def update(self, version):
        """Compute with the weights of a version from now on."""

        def write(model):
            for at, each in enumerate(norms(model)):
                each.data.copy_(torch.linspace(0.5, 1.5, len(each)).roll(7 * at + 40 * version))

        self.server.llm.apply_model(write)

    def sleep(self, level=1, mode="abort"):
        self.server.llm.sleep(level=level, mode=mode)
        for each in self.runner.kv_caches:
            each.fill_(float("nan"))
        for each in norms(self.runner.model) if level == 2 else ():
            self.saved.append(each.data.clone())
            each.data.fill_(float("nan"))

    def wake(self):
        """Wake up with memory that has other numbers: rows after the last token are read, too."""
        for each in self.runner.kv_caches:
            each.fill_(100)
        for each, before in zip(norms(self.runner.model), self.saved, strict=False):
            each.data.copy_(before)
        self.saved = []
        self.server.llm.wake_up()


def begin(server, prompts, steps):
    """Give requests to a server and make some steps, so that they are in flight."""
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=1, detokenize=False)
    for at, each in enumerate(prompts):
        server.llm.llm_engine.add_request(str(at), {"prompt_token_ids": each}, sampling)
    for _ in range(steps):
        server.llm.llm_engine.step()


def rest(server):
    """The answers of the requests in flight."""
    engine, done = server.llm.llm_engine, {}
    while engine.has_unfinished_requests():
        done |= {one.request_id: one for one in engine.step() if one.finished}
    return [servers.answer(done[ident]) for ident in sorted(done)]


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_blocks_of_the_same_weights_come_from_host_memory_and_disk(
    model, tmp_path, level
):
    with servers.serve(model, tiers(tmp_path / "kv", host=16)) as server:
        weights = Weights(server)
        weights.update(0)
        right = server.answers(PROMPTS)
        server.wait_for_stores()  # so that the disk has what host memory has no room for
        weights.sleep(level)
        weights.wake()
        same(server.answers(PROMPTS), right)
        assert server.found == ALL
        tokens = server.kv_scheduler.cache.counters.tokens
        assert min(tokens["host"], tokens["disk"]) > 0
        server.check()


def test_requests_in_flight_sleep_too_and_no_copy_of_lost_memory_is_kept(model):
    with servers.serve(model) as plain:
        right = plain.answers(PROMPTS)
    settings = {"tiers": [{"kind": "host", "blocks": 64}]}
    with servers.serve(model, settings) as server:
        weights = Weights(server)
        for steps in range(1, 6):
            begin(server, PROMPTS, steps)
            weights.sleep(mode="keep")
            assert server.kv_scheduler.manager.stats().leases == 0
            weights.wake()
            same(rest(server), right)
            server.wait_for_stores()
            server.forget()
            same(server.answers(PROMPTS), right)
            assert server.found == ALL
            server.check()
            assert server.llm.reset_prefix_cache(reset_connector=True)


def test_weights_that_come_back_find_their_blocks_and_no_others(model, tmp_path):
    with servers.serve(model, tiers(tmp_path / "kv")) as server:
        weights = Weights(server)
        weights.update(0)
        first = server.answers(PROMPTS)
        begin(server, PROMPTS[:1], 3)  # a request that lives across the change
        weights.sleep(mode="keep")
        weights.update(1)
        weights.wake()
        rest(server)
        server.wait_for_stores()
        server.forget()
        other = server.answers(PROMPTS)
        assert server.found == 0
        assert [tokens for tokens, _ in other] != [tokens for tokens, _ in first]
        server.wait_for_stores()
        server.forget()
        same(server.answers(PROMPTS), other)
        assert server.found == ALL
        weights.sleep()
        weights.update(0)
        weights.wake()
        same(server.answers(PROMPTS), first)
        assert server.found == ALL
        # Two further versions: only the last two are kept.
        for version in (2, 3):
            weights.update(version)
            server.answers([prompt(9, 40)])
        weights.update(0)
        server.forget()
        same(server.answers(PROMPTS), first)
        assert server.found == 0
        server.check()


def play(server, seed):
    """One random sequence of calls; the answers and what was found for them."""
    draw, weights = random.Random(seed), Weights(server)
    answers, found = [], 0
    weights.update(0)
    for _ in range(7):
        what = draw.choice(CALLS)
        prompts = [*PROMPTS, prompt(seed, 150, after=PROMPTS[0][:100])]
        some = draw.sample(prompts, 3)
        if what == "serve":
            answers += server.answers(some)
            found += server.found
        elif what == "sleep":
            begin(server, some, draw.randrange(5))
            weights.sleep(draw.choice([1, 2]), "keep")
            if changes := draw.random() < 0.5:
                weights.saved = []
                weights.update(draw.randrange(3))
            weights.wake()
            # A server may have sampled more tokens by the weights before than another one.
            answers += [] if changes else rest(server)
            rest(server)
        elif what == "update":
            weights.sleep()
            weights.update(draw.randrange(3))
            weights.wake()
        elif what == "pause":
            server.core.pause_scheduler(mode="keep", clear_cache=True)
            server.core.resume_scheduler()
        else:
            server.llm.reset_prefix_cache(reset_connector=True)
    server.forget()
    return answers, found


def test_random_sequences_of_sleep_updates_and_resets_give_the_tokens_of_a_plain_server(
    model, tmp_path
):
    with servers.serve(model) as plain:
        right = [play(plain, seed)[0] for seed in range(30)]
    with servers.serve(model, tiers(tmp_path / "kv", host=24)) as server:
        found = 0
        for seed, answers in enumerate(right):
            got, more = play(server, seed)
            assert [tokens for tokens, _ in got] == [tokens for tokens, _ in answers]
            found += more
        assert found > 30 * BLOCK
        server.check()
        assert server.llm.reset_prefix_cache(reset_connector=True)
        server.wait_for_stores()
        assert server.kv_scheduler.manager.stats().blocks == 0
        server.answers(PROMPTS)
        assert server.found == 0
