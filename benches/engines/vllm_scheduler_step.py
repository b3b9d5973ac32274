"""One vLLM server in this process: what its connector's calls cost the scheduler, per step.

Requests of some 2,000 tokens run and wait; vLLM's own cache is emptied, and the same ones come
again, so that steps store, load, decode and end requests. The model computes nothing: its answer is
zeros. Every call that the scheduler and its engine make of the scheduler's side of the connector is
timed, in processor time of their thread, so that other processes do not count. A line of JSON says
what it came to.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

from benches.engines.vllm_first_token import BLOCK, block_bytes, transfer  # its settings first

import numpy as np  # isort: skip
import torch  # isort: skip
from vllm import LLM, SamplingParams  # isort: skip
from vllm.config import KVEventsConfig  # isort: skip


class TimedCalls:
    """The public methods of a connector, timed from outside.

    Args:
        connector: the scheduler's side of it.
    """

    def __init__(self, connector):
        self.steps, self.calls, self.depth = [], Counter(), 0
        self.spent = 0
        for name in dir(type(connector)):
            if not name.startswith("_") and callable(getattr(type(connector), name)):
                setattr(connector, name, self.timed(name, getattr(connector, name)))

    def timed(self, name, call):
        """The same method; what one calls of the others is part of it."""

        def counted(*args, **kwargs):
            if self.depth:
                return call(*args, **kwargs)
            self.depth = 1
            begun = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - begun
                self.depth = 0
                self.calls[name] += took
                self.spent += took

        return counted

    def step(self):
        """A step has ended."""
        self.steps.append(self.spent)
        self.spent = 0


def compute_nothing(core, hidden):
    """Have the model answer with zeros, so that steps take as long as the scheduler does."""
    runner = core.model_executor.driver_worker.worker.model_runner

    def zeros(input_ids=None, **_):
        return torch.zeros(len(input_ids), hidden)

    runner._model_forward = zeros  # noqa: SLF001 - vLLM has it for profilers


def ask(llm, prompts, answer, *, why=False):
    """Tokens of each prompt that were found, on host or in vLLM's own cache."""
    asks = {"kv_transfer_params": {"kvtrie": {"why": True}}} if why else None
    sampling = SamplingParams(
        max_tokens=answer, temperature=0, detokenize=False, ignore_eos=True, extra_args=asks
    )
    outputs = llm.generate(
        [{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False
    )
    return [each.num_cached_tokens or 0 for each in outputs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", choices=["kvtrie", "offload"], required=True)
    parser.add_argument(
        "--why",
        choices=["off", "sampling", "all"],
        default="sampling",
        help="whether computed tokens are counted by cause, and which requests ask for theirs",
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--events", action="store_true", help="publish KV events")
    parser.add_argument("--groups", type=int, default=1, help="vLLM's groups of layers")
    given = parser.parse_args()
    size, vocabulary = block_bytes(given.model, given.dtype)
    each = (given.tokens + given.answer) // BLOCK + 2
    settings = transfer(given.what, size * each * (given.requests + 2), "")
    if given.why == "off":
        settings["kv_connector_extra_config"]["why"] = False
    elif given.why == "all":
        settings["kv_connector_extra_config"]["why_clients"] = True
    llm = LLM(
        given.model,
        skip_tokenizer_init=True,
        dtype=given.dtype,
        block_size=BLOCK,
        max_model_len=given.tokens + given.answer + 8,
        max_num_batched_tokens=given.tokens + 48,
        max_num_seqs=max(1, given.requests // 2),
        num_gpu_blocks_override=given.groups * each * max(1, given.requests // 2),
        enforce_eager=True,
        disable_log_stats=False,
        disable_hybrid_kv_cache_manager=given.groups == 1,
        kv_transfer_config=settings,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, endpoint="inproc://kv-events")
        if given.events
        else None,
    )
    core = llm.llm_engine.engine_core.engine_core
    config = json.loads((Path(given.model) / "config.json").read_text())
    compute_nothing(core, config["hidden_size"])
    draw = np.random.default_rng(7)
    prompts = [draw.integers(1, vocabulary, given.tokens).tolist() for _ in range(given.requests)]
    ask(
        llm, [draw.integers(1, vocabulary, given.tokens).tolist()], 2
    )  # compile before the clock starts
    # A collection of the objects of the start would count for the step that it falls into.
    gc.collect()
    gc.freeze()
    timed = TimedCalls(core.scheduler.connector)
    schedule = core.scheduler.schedule

    def scheduled(*args, **kwargs):
        timed.step()
        return schedule(*args, **kwargs)

    core.scheduler.schedule = scheduled
    found = []
    for _ in range(2):
        found.append(ask(llm, prompts, given.answer, why=given.why == "all"))
        for _ in range(20):  # offloads in flight end
            core.step_fn()
        assert llm.reset_prefix_cache()
    assert not any(found[0])
    assert all(tokens >= given.tokens - BLOCK - 1 for tokens in found[1]), found[1]
    timed.step()
    steps = timed.steps[1:]
    outputs = {
        "what": given.what,
        "why": given.why,
        "steps": len(steps),
        "us": sum(steps) / len(steps) / 1e3,
        "request_us": sum(steps) / (2 * given.requests) / 1e3,
        "median_us": median(steps) / 1e3,
        "p99_us": sorted(steps)[99 * len(steps) // 100] / 1e3,
        "most_us": max(steps) / 1e3,
        "calls_us": {name: took / len(steps) / 1e3 for name, took in timed.calls.most_common()},
    }
    sys.stdout.write(json.dumps(outputs) + "\n")


if __name__ == "__main__":
    main()
