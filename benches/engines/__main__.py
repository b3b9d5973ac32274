"""Time to the first token in vLLM, computed and from each tier, and what a step costs; with ratios.

    python -m benches.engines

SmolLM2-135M, prompts of 2,000 random tokens, one at a time; steps with 32 of them running and
waiting, on a small model. Figures go to `--json FILE`; the rows of models with several groups of
layers are printed only, `python -m benches.engines.hybrid` records them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benches.core.place import place
from benches.engines import hybrid
from benches.engines.launch import LMCACHE, found, run
from benches.record import show

KINDS = {
    "none": "none",
    "host": "kvtrie",
    "disk": "kvtrie",
    "restart": "kvtrie",  # after "disk", whose folder it opens
    "offload": "offload",
}
TURNS = {
    "kvtrie": ("kvtrie",),
    "offload": ("offload",),
    "kvtrie without why": ("kvtrie", "--why", "off"),
    "kvtrie, all ask why": ("kvtrie", "--why", "all"),
}
STEPS = {"step, mean": "us", "step, median": "median_us", "step, 99th percentile": "p99_us"}
GOALS = {
    "ttft host": 12,
    "ttft disk": 6,
    "beside offload": 1,
    "miss": 0.97,
    "step, mean": 1.5,
    "step, median": 2,
    "step, 99th percentile": 1,
}
# Ratios that may not be larger: of a scheduler step to one with `why` off, and of times.
MOST = {
    "why sampling": 1.03,
    "why all": 1.1,
    "explain and hash": 2,
    "slowest step of 256 requests, to 5 ms": 1,
}
EXPLAINED = 100_000  # tokens
# Weights so wide that a wrong block shows in the next token.
WIDE = {"initializer_range": 0.15, "bos_token_id": None, "eos_token_id": None}


def smollm_folder(console):
    """Folder of SmolLM2, as the demo converts it."""
    from kvtrie.demo import model

    model.smollm(console)
    return str(next(model.cache_folder().glob("smollm2-135m-instruct-*")))


def tiny_folder(folder, **more):
    """A small random model, made on the spot, with further fields of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def first_token(given, model, what, disk="", *more):
    """Measure the first tokens of one server."""
    more = ["--rounds", str(given.rounds), "--disk", disk, *more]
    return measure("vllm_first_token", given, model, what, more)


def fastest(turns):
    """The server that computed fastest: one keeps its speed, and shared machines have several."""
    well = [report for report in turns if "error" not in report]
    return min(well, key=pace) if well else turns[0]


def pace(figures):
    """The seconds by which servers of one kind are compared."""
    return median(figures["computed_s"]) if figures["computed_s"] else found(figures)


def scheduler_steps(given, model):
    """Time both connectors' calls in turns; the model's size changes nothing."""
    more = ["--requests", "8", "--answer", "16"] if given.tiny else []
    turns = {name: [] for name in TURNS}
    for _ in range(given.turns):
        for name, (what, *why) in TURNS.items():
            turns[name].append(measure("vllm_scheduler_step", given, model, what, [*more, *why]))
    return turns


def crowd_steps(given, model):
    """Time the connector's calls with 256 running requests, which come in bursts."""
    return measure(
        "vllm_scheduler_step", given, model, "kvtrie", ["--requests", "8" if given.tiny else "512"]
    )


def many_requests(given, model):
    """Compare the answers of many requests at once with those of a server without kvtrie."""
    count = "300" if given.tiny else "10000"
    return run("vllm_many", "many", ["--model", model, "--requests", count])


def measure(module, given, model, what, more):
    """Run a server in a separate process and return its figures."""
    about = ["--what", what, "--model", model, "--dtype", given.dtype]
    return run(module, what, [*about, "--tokens", str(given.tokens), *more])


def rows_of(servers, steps):
    """A row of the table for each kind of figure: its name, and the figure or what went wrong."""
    rows = []
    for name, report in servers.items():
        if name == "none":
            rows.append(("computed", report.get("error") or ms(median(report["computed_s"]))))
        else:
            rows.append((f"from {name}", report.get("error") or ms(found(report))))
    for name, turns in steps.items():
        wrong = [each["error"] for each in turns if "error" in each]
        rows.append((f"step of {name}, mean", wrong[0] if wrong else us(step(turns))))
        if not wrong:
            rows += [
                (f"step of {name}, {what}", us(step(turns, figure)))
                for what, figure in (("median", "median_us"), ("99th percentile", "p99_us"))
            ]
    return rows


def rows_of_many(many):
    """Rows of the requests that ran at once."""
    if "error" in many:
        return [("many requests", many["error"])]
    what = f"answers of {many['requests']:,} requests, {many['at_once']} at once"
    return [
        (f"{what}, that differ", f"{many['different']} ({many['ties']} ties)"),
        *(
            (f"memory that they leave, {name}", f"{size:.0f} bytes each")
            for name, size in many["bytes_per_request"].items()
        ),
    ]


def ratios_of(servers, steps, explained=None, crowd=None):
    """Ratios between the servers that started."""
    well = {name: figures for name, figures in servers.items() if "error" not in figures}
    ratios = {}
    if "none" in well:
        computed = median(well["none"]["computed_s"])
        if "host" in well:
            ratios["miss"] = computed / median(well["host"]["computed_s"])
        for name in well.keys() & {"host", "disk"}:
            ratios[f"ttft {name}"] = computed / found(well[name])
    if well.keys() >= {"host", "offload"}:
        ratios["beside offload"] = found(well["offload"]) / found(well["host"])
    if not any("error" in each for turns in steps.values() for each in turns):
        for name, figure in STEPS.items():
            ratios[name] = step(steps["offload"], figure) / step(steps["kvtrie"], figure)
        if steps.keys() >= TURNS.keys():
            off = step(steps["kvtrie without why"])
            ratios["why sampling"] = step(steps["kvtrie"]) / off
            ratios["why all"] = step(steps["kvtrie, all ask why"]) / off
    if explained is not None and "error" not in explained:
        ratios["explain and hash"] = explained["explain_ms"] / explained["hash_ms"]
    if crowd is not None and "error" not in crowd:
        ratios["slowest step of 256 requests, to 5 ms"] = crowd["most_us"] / 5000
    return {name: ratios[name] for name in (*GOALS, *MOST) if name in ratios}


def step(turns, figure="us"):
    """The median over servers of one figure of their steps."""
    return median(each[figure] for each in turns)


def us(microseconds):
    return f"{microseconds:.0f} µs"


def ms(seconds):
    return f"{seconds * 1e3:.0f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--turns", type=int, default=3, help="servers of each kind, one after the other in turns"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--quick", "--tiny", dest="tiny", action="store_true", help="a random model, in a minute"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_folder(Path(folder) / "model")
        steps = scheduler_steps(given, tiny)
        crowd = crowd_steps(given, tiny)
        tokens = EXPLAINED // (10 if given.tiny else 1)
        many = many_requests(given, tiny_folder(Path(folder) / "wide", **WIDE))
        explained = run("vllm_explain", "explain", ["--tokens", str(tokens)])
        model = tiny if given.tiny else smollm_folder(console)
        tries = {name: [] for name in KINDS}
        for turn in range(given.turns):
            for name, what in KINDS.items():
                disk = f"{folder}/kv{turn}" if name in {"disk", "restart"} else ""
                more = ["--restarted"] if name == "restart" else []
                tries[name].append(first_token(given, model, what, disk, *more))
        servers = {name: fastest(report) for name, report in tries.items()}
        if LMCACHE.exists():
            servers["lmcache"] = first_token(given, model, "lmcache")
    ratios = ratios_of(servers, steps, explained, crowd)
    table = Table("", "median", "goal", title="vLLM, with kvtrie and without")
    for name, report in rows_of(servers, steps):
        table.add_row(name, report, "")
    for what in ("explain", "hash"):
        table.add_row(
            f"{what} of {tokens:,} tokens",
            explained.get("error") or f"{explained[f'{what}_ms']:.1f} ms",
            "",
        )
    for name, report in rows_of_many(many):
        table.add_row(name, report, "0" if name.startswith("answers") else "")
    for name, ratio in ratios.items():
        goal = f"{GOALS[name]}x" if name in GOALS else f"at most {MOST[name]}x"
        table.add_row(name, f"{ratio:.2f}x", goal)
    console.print(table)
    show(hybrid.rows(quick=given.tiny))
    if given.json:
        report = {"place": place(), "dtype": given.dtype}
        report |= {"tokens": given.tokens, "rounds": given.rounds, "tiny": given.tiny}
        report |= {
            "ratios": ratios,
            "goals": GOALS,
            "most": MOST,
            "servers": servers,
            "steps": steps,
            "crowd": crowd,
            "explained": explained,
            "many": many,
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    ours = [report for name, report in servers.items() if name != "lmcache"]
    report = [*ours, explained, many, crowd, *(each for turns in steps.values() for each in turns)]
    return 1 if any("error" in each for each in report) or many["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
