"""Sessions with streaming input in vLLM's real scheduler: stored rows are those of their tokens."""

from __future__ import annotations

import random
from importlib.metadata import version

import numpy as np
import pytest
import servers  # noqa: F401 - its settings first
import torch
from modelfree import LAYERS, SIZE, WORDS, Engine, answer, marks
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus
from vllm_schedules import KINDS, model, tiers  # noqa: F401 - a fixture

# vLLM 0.30 answers every input of a session with as many tokens as its first one asks for.
FIRST_LENGTH = version("vllm").startswith("0.30.")
ROOM = 5 * (4 * 80 // SIZE + 2)  # blocks of five sessions of four inputs and answers each


class SessionEngine(Engine):
    """An engine whose requests are sessions: inputs come while a turn runs, or after it."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.inputs, self.outputs, self.contexts, self.seen = {}, {}, {}, []
        self.lengths = {}  # of the first answer of each session

    def input(self, name, tokens, count):
        """One more input of a session; None for `tokens` ends the session."""
        sampling = SamplingParams(
            max_tokens=count, temperature=0, detokenize=False, ignore_eos=True
        )
        sampling.update_from_generation_config({}, None)
        prompt = [0] if tokens is None else list(tokens)
        request = Request(
            name, prompt, sampling, None, block_hasher=self.hasher, resumable=tokens is not None
        )
        if (first := name not in self.prompts) and tokens is not None:
            self.prompts[name] = ([], 0, request)
            self.inputs[name], self.outputs[name] = [], []
        self.lengths.setdefault(name, count)
        self.inputs[name].append(self.lengths[name] if FIRST_LENGTH else count)
        waits = not first and self.prompts[name][2].status.name == "WAITING_FOR_STREAMING_REQ"
        if waits:
            self.seen.append(list(self.prompts[name][2].all_token_ids))
        self.scheduler.add_request(request)
        if first or (waits and tokens is not None):
            self.begin(name)
        if waits and tokens is None:
            self.prompts.pop(name)

    def begin(self, name):
        request = self.prompts[name][2]
        self.contexts[name] = list(request.prompt_token_ids)
        self.seen.append(self.contexts[name])

    def on_output(self, output):
        name = output.request_id
        self.outputs[name] += output.new_token_ids
        if output.finish_reason is None:
            return
        request, count = self.prompts[name][2], self.inputs[name].pop(0)
        assert self.outputs[name] == answer(self.contexts[name], count)
        self.seen.append([*self.contexts[name], *self.outputs[name]])
        self.outputs[name] = []
        self.right += 1
        if request.status in (RequestStatus.WAITING, RequestStatus.RUNNING):
            self.begin(name)
        elif request.is_finished():
            self.prompts.pop(name)

    def stored(self):
        """Compare the rows of every block on host, of every sequence that was ever seen."""
        found = 0
        for tokens in self.seen:
            numbers = marks(tokens)
            blocks = self.kv_scheduler.manager.lookup(
                tokens, now=self.kv_scheduler.cache.clock(), keep=0
            ).blocks
            for at, block in enumerate(blocks):
                wanted = torch.tensor(numbers[at * SIZE : (at + 1) * SIZE])
                for copy in block.copies:
                    if copy.tier != 1 or copy.layer_hi != len(LAYERS):
                        continue
                    found += 1
                    for worker in self.workers:
                        host = worker._worker.host
                        (first, *_) = host.layer_units(np.asarray([copy.slot]), 0)
                        for row in range(first, first + worker._worker.gpu.layers):
                            rows = host.planes[0][row].view(torch.float32).view(2, SIZE, 2)
                            assert (rows == wanted[None, :, None]).all(), (tokens, at)
        return found


def play(engine, seed, sessions=8):
    """Sessions of up to four inputs; a block's last token is often one that is replaced."""
    draw = random.Random(seed)
    left = {}
    for at in range(sessions):
        left[str(at)] = draw.randint(1, 4)
    while left or engine.prompts:
        for name in list(left):
            if draw.random() < 0.3 and (name in engine.prompts or len(engine.prompts) < 5):
                left[name] -= 1
                tokens = [draw.randrange(WORDS) for _ in range(draw.choice([1, 1, 7, SIZE, 40]))]
                engine.input(name, tokens, draw.choice([1, 2, SIZE, draw.randint(1, 40)]))
                if not left[name]:
                    del left[name]
                    engine.input(name, None, 1)
        for _ in range(draw.randint(1, 6)):
            engine.step()
        if draw.random() < 0.1:
            engine.stored()
    engine.drain()


@pytest.mark.parametrize("kind", ["plain", "ahead", "ranks"])
def test_random_schedules_of_sessions(model, kind):  # noqa: F811
    found = 0
    for seed in range(3):
        # Sessions that wait for an input hold their blocks: vLLM needs room for all that are open.
        engine = SessionEngine(model, tiers("", 60), blocks=ROOM, seed=seed, **KINDS[kind])
        play(engine, seed)
        found += engine.stored()
        engine.close()
        assert engine.right > 8
    assert found > 100
