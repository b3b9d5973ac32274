"""vLLM servers of one workload: what each request finds; runs in the engine's environment.

    .engines/vllm/bin/python -m benches.eval_advise.server --model FOLDER --workload chats

One server after the other has the given settings. With `--ports` a single one runs without kvtrie
and publishes KV events: it waits for a line on standard input before the first request, and for
another before it ends, and serves metrics until then. With `--profile` one without kvtrie is timed
instead. Prints a line of JSON per request, or the step times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benches.eval_advise.workloads import LONGEST, WORDS, WORKLOADS

SERVED = Path(__file__).parents[2] / "tests" / "served"
BLOCK = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--gpu", type=int, required=True, help="blocks")
    parser.add_argument("--settings", nargs="*", default=[], help="POLICY:BLOCKS of host memory")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--profile", action="store_true", help="time the steps")
    parser.add_argument("--ports", type=int, nargs=3, help="of events, their history, and metrics")
    given = parser.parse_args()
    sys.path.insert(0, str(SERVED))
    import servers

    if given.profile:
        profiled(servers, given)
        return
    turns = list(WORKLOADS[given.workload](**steps(given)))
    if given.ports:
        listened(servers, given, turns)
    for setting in given.settings:
        policy, _, host = setting.rpartition(":")
        extra = {"tiers": [{"kind": "host", "blocks": int(host)}], "policy": policy}
        with serve(servers, given, extra) as server:
            warm(server.llm)
            for record in play(server, turns, connected=True):
                show({"setting": setting, **record})
        show({"setting": setting, "done": True})


def serve(servers, given, extra, **more):
    """A server whose requests have times."""
    more |= {"max_model_len": LONGEST + 60, "disable_log_stats": False, "block_size": BLOCK}
    return servers.serve(given.model, extra, blocks=given.gpu, **more)


def profiled(servers, given):
    """Show the step times of a server, by its own clock."""
    from kvtrie.sim.server_profile import profile_server

    with serve(servers, given, None) as server:
        warm(server.llm)
        timed = Timed(server.llm)
        show(profile_server(timed, longest=LONGEST, requests=(1,), vocabulary=WORDS))


class Timed:
    """Answers of vLLM in this process, one at a time, for `profile_server`."""

    def __init__(self, llm):
        self.llm = llm

    def answer(self, prompt, tokens):
        """The times of an answer: of its prefill, and evenly of its other tokens."""
        from kvtrie.sim.completions import Answer

        stats = ask(self.llm, prompt, tokens).metrics
        begin, first, last = stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts
        step = (last - first) / max(1, tokens - 1)
        parts = [round(1e9 * (first - begin + step * at)) for at in range(tokens)]
        return Answer(0, tuple(parts), tokens, None)


def listened(servers, given, turns):
    """Play the turns on a server that publishes events, when a line asks for it."""
    from prometheus_client import start_http_server
    from vllm.config import KVEventsConfig

    events, replay, metrics = given.ports
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{events}",
        replay_endpoint=f"tcp://*:{replay}",
    )
    start_http_server(metrics, addr="127.0.0.1")
    with serve(servers, given, None, kv_events_config=config) as server:
        warm(server.llm)
        show({"ready": True})
        sys.stdin.readline()
        for record in play(server, turns, connected=False):
            show(record)
        show({"done": True})
        sys.stdin.readline()


def steps(given):
    return {"turns" if given.workload == "chats" else "steps": given.turns}


def show(record):
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def warm(llm):
    """Compile, and forget."""
    ask(llm, [1] * 200, 2)
    assert llm.reset_prefix_cache()


def play(server, turns, *, connected):
    """Play the turns, each at its time; a late one delays all that follow, so they stay apart."""
    paths, begin = {}, time.monotonic()
    for turn in turns:
        path = [*turn.begin, *turn.added] if turn.begin else [*paths[turn.who], *turn.added]
        wait = begin + turn.at - time.monotonic()
        time.sleep(max(0.0, wait))
        begin += max(0.0, -wait)
        output = ask(server.llm, path, turn.answer)
        paths[turn.who] = [*path, *output.outputs[0].token_ids]
        stats = output.metrics
        if connected:
            server.wait_for_stores()
            found = server.kv_scheduler.cache.counters.tokens["host"]
        yield {
            "prompt": len(path),
            "cached": output.num_cached_tokens,
            "host": found if connected else 0,
            "prefill_s": stats.first_token_ts - stats.scheduled_ts,
        }


def ask(llm, prompt, tokens):
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return output


if __name__ == "__main__":
    main()
