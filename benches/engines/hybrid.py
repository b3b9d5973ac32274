"""Models with several groups of layers in vLLM: room, bytes, first tokens, steps; with goals.

    python -m benches.engines.hybrid

Tiny random models, in processes of the engine's own environment. Part of `make bench-engines`.
Cost: four minutes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from benches.core.place import place
from benches.engines.launch import found, run
from benches.record import Result, bounded, document, keep, options, show

OUT = Path(__file__).parents[1] / "results" / "engines_hybrid.json"
TURNS = 3
HOST = 2**29
MIB = 2**20
FIRST = {
    "Gemma 3": ("gemma", 1500, ["--groups", "2"]),
    "Qwen3-Next": ("qwen", 2200, ["--states", "--dtype", "bfloat16", "--host", str(2**28)]),
}


def served(module, *more):
    """Run a module, and return its figures.

    Raises:
        RuntimeError: what went wrong in it.
    """
    # The models are tiny: a second thread makes no step faster, and waits where cores are shared.
    os.environ["OMP_NUM_THREADS"] = "1"
    report = run(module, "kvtrie", more)
    if "error" in report:
        raise RuntimeError(f"{module} {' '.join(more)}: {report['error']}")
    return report


def room(model):
    """Tokens of prompts that fit into vLLM's memory with our connector, and without."""
    tokens = served("vllm_hybrid", "--what", "room", "--model", model)["tokens"]
    ours, peer = tokens["kvtrie"], tokens["none"]
    what, unit, ratio, goal = "room for KV, 64 windows", "tokens", round(ours / peer, 3), 0.99
    more = {"all layers": tokens["all layers"]}
    return Result(what, ours, unit, peer, "no connector", ratio, goal, ratio >= goal, more)


def moved(model):
    """Bytes that a prompt moves to a full host memory and back; `empty` under `more`."""
    size = served("vllm_hybrid", "--what", "moved", "--model", model)["bytes"]
    rows = []
    for state, most in (("full", 1 / 4), ("empty", None)):
        ours, peer = (sum(size[name][state].values()) / MIB for name in ("groups", "all layers"))
        what = f"bytes moved, 64 windows, host {state}"
        rows.append(bounded(what, ours, peer, "MiB", "all layers", most, bytes=size))
    return rows


def memory(model):
    """Resident memory that a server with a full host memory has beyond one without."""
    more = [["--bytes", str(HOST)], []]
    about = ["vllm_hybrid", "--what", "memory", "--model", model]
    full, none = (served(*about, *one) for one in more)
    used = full["resident"] - none["resident"]
    return bounded("host memory, full", used / MIB, HOST / MIB, "MiB", "bytes given", 1.1)


def first(name, models, rounds):
    """First token of a prompt from host memory, and computed by a server without us."""
    model, tokens, more = FIRST[name]
    more = ["--model", models[model], "--tokens", str(tokens), "--rounds", str(rounds), *more]
    ours, none = (served("vllm_first_token", "--what", what, *more) for what in ("kvtrie", "none"))
    what = f"first token from host, {name}, {tokens:,} tokens"
    computed = 1e3 * median(none["computed_s"])
    return bounded(what, 1e3 * found(ours), computed, "ms", "computed", 0.5)


def steps(model, turns, more):
    """Time of the scheduler's calls per request, in turns, of six groups and of one."""
    times = {6: [], 1: []}
    for _ in range(turns):
        for groups, took in times.items():
            about = ["--what", "kvtrie", "--model", model, "--groups", str(groups), *more]
            took.append(served("vllm_scheduler_step", *about)["request_us"])
    six, one = (median(took) for took in times.values())
    return bounded("scheduler, per request, six groups", six, one, "us", "one group", 2)


def rows(*, quick):
    """All rows."""
    small = ["--requests", "8", "--answer", "16"] if quick else []
    with tempfile.TemporaryDirectory() as folder:
        models = served("vllm_hybrid", "--what", "models", "--model", folder)["models"]
        six = models["gemma six groups"]
        return [
            room(six),
            *moved(six),
            memory(six),
            *(first(name, models, 2 if quick else 7) for name in FIRST),
            steps(six, 1 if quick else TURNS, small),
        ]


def main() -> int:
    """Measure, report, and keep what was whole."""
    given = options(__doc__, OUT).parse_args()
    record = rows(quick=given.quick)
    if not keep(given, document(place(), record)):
        show(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
