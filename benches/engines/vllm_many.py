"""Many requests at once: answers of a server with kvtrie, compared with one without it.

Conversations over a few beginnings, 64 requests in flight, in a vLLM server without kvtrie, in one
whose GPU memory, host memory and disk are all full, and in one without it again. Answers are
greedy. Where two answers part, the first server's two most likely tokens there may be as likely as
each other: a tie, which another batch decides otherwise. Prints a line of JSON: answers that differ
without a tie, ties, tokens found, and resident memory of the process as it goes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
from vllm import LLM, SamplingParams

from benches.engines.answers import BLOCK, compare, prompts_of
from benches.engines.launch import PORTABLE

ANSWER = 6  # tokens
SAMPLES = 50  # of resident memory


class Served(NamedTuple):
    """Answers of one server.

    Attributes:
        tokens: `(n, ANSWER)`; -1 after a shorter answer.
        margins: log-probability of each above that of the second best token.
        memory: requests that have ended, and bytes of this process then.
        seconds: time that all took.
        found: tokens that the connector found, by tier.
    """

    tokens: np.ndarray
    margins: np.ndarray
    memory: list
    seconds: float
    found: dict


def resident():
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def answers(given, prompts, extra):
    """Return the answers of one server."""
    transfer = {
        "kv_connector": "KvtrieConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    llm = LLM(
        given.model,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=640,
        max_num_seqs=given.at_once,
        num_gpu_blocks_override=9 * given.at_once,
        enforce_eager=True,
        disable_log_stats=True,
        kv_transfer_config=None if extra is None else transfer,
        **PORTABLE,
    )
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, logprobs=2, detokenize=False)
    engine, begun = llm.llm_engine, time.perf_counter()
    # Written now, so that their pages do not count as growth.
    tokens = np.full((len(prompts), ANSWER), -1, dtype=np.int64)
    margins = np.full((len(prompts), ANSWER), np.inf)
    memory = []
    each, sent, done = max(1, len(prompts) // SAMPLES), 0, 0
    while done < len(prompts):
        for at in range(sent, min(len(prompts), done + given.at_once)):
            engine.add_request(str(at), {"prompt_token_ids": prompts[at]}, sampling)
        sent = min(len(prompts), done + given.at_once)
        for output in engine.step():
            if not output.finished:
                continue
            at, one = int(output.request_id), output.outputs[0]
            tokens[at, : len(one.token_ids)] = one.token_ids
            for place, step in enumerate(one.logprobs):
                best = sorted((row.logprob for row in step.values()), reverse=True)
                margins[at, place] = best[0] - best[1]
            done += 1
            if not done % each:
                memory.append((done, resident()))
    took = time.perf_counter() - begun
    core = engine.engine_core.engine_core
    found = {}
    if extra is not None:
        scheduler = core.scheduler.connector.scheduler
        while scheduler.busy:
            engine.step()
        found = dict(scheduler.cache.counters.tokens)
        scheduler.manager.audit()
    engine.engine_core.shutdown()
    del llm, engine, core
    gc.collect()
    return Served(tokens, margins, memory, took, found)


def growth(memory):
    """Bytes of resident memory that a request leaves, over the second half of the requests."""
    late = np.array(memory[len(memory) // 2 :], dtype=float)
    return float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) if len(late) > 1 else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=64)
    given = parser.parse_args()
    config = json.loads((Path(given.model) / "config.json").read_text())
    prompts = prompts_of(given.requests, config["vocab_size"])
    right = answers(given, prompts, None)
    with tempfile.TemporaryDirectory() as folder:
        tiers = [
            {"kind": "host", "blocks": 1500},
            {"kind": "disk", "blocks": 4000, "path": folder},
        ]
        got = answers(given, prompts, {"tiers": tiers})
    again = answers(given, prompts, None)  # the first one warms the process up
    different, ties = compare(right.tokens, right.margins, got.tokens)
    servers = {"none": again, "kvtrie": got}
    figures = {
        "what": "many",
        "requests": given.requests,
        "at_once": given.at_once,
        "different": different,
        "different_without": compare(right.tokens, right.margins, again.tokens)[0],
        "ties": ties,
        "found": got.found,
        "seconds": {name: one.seconds for name, one in servers.items()},
        "bytes_per_request": {name: growth(one.memory) for name, one in servers.items()},
        "memory": got.memory,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
