"""The pictures of the documentation, drawn from the records in `benches/results`.

    python -m benches.pictures

Each picture keeps the figures that it shows in its PNG, so that a test compares them with the
records. Cost: a second per picture.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benches.pages import write_part
from kvtrie.canvas import INK, figure
from kvtrie.output import write_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
README = ROOT / "README.md"
RESULTS = ROOT / "benches/results"
FIGURES = "Description"  # the text chunk of a PNG that holds its figures
OURS, OTHER, PLAIN = "#1b4f8a", "#d98c21", "#9a9a9a"
SERVED = "#c0392b"  # the second policy of a panel with points


def first_token(record: dict[str, Any]) -> dict[str, float]:
    """Milliseconds to the first token of a returning chat, by where its KV comes from."""
    servers = record["servers"]

    def loaded(name: str) -> float:
        return 1e3 * median(took for took, _ in servers[name]["found"])

    figures = {"computed again": 1e3 * median(servers["none"]["computed_s"])}
    figures["vLLM's own offloading, from host memory"] = loaded("offload")
    if "restart" in servers:
        figures["kvtrie, from disk after a restart"] = loaded("restart")
    figures["kvtrie, from disk"] = loaded("disk")
    figures["kvtrie, from host memory"] = loaded("host")
    return {name: round(ms) for name, ms in figures.items()}


def draw_first_token(figures: dict[str, float]) -> Figure:
    """Draw bars, one per place that the KV comes from."""
    computed, best = figures["computed again"], min(figures.values())
    times = f"{computed / best:.0f} times sooner"
    drawn = figure(f"A returning chat of 2,000 tokens answers {times} from host memory", 3.4)
    axes = drawn.subplots()
    names = list(reversed(figures))
    colours = [OURS if "kvtrie" in name else OTHER if "vLLM" in name else PLAIN for name in names]
    bars = axes.barh(names, [figures[name] for name in names], color=colours, height=0.62)
    axes.bar_label(bars, fmt="{:,.0f} ms", padding=4, color=INK)
    axes.set_xlim(0, 1.12 * computed)
    axes.set_xlabel("time to first token, ms (median; SmolLM2-135M, float32, vLLM on 2 CPU cores)")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return drawn


def caption(figures: dict[str, float]) -> str:
    """The sentence of README.md about the first tokens."""
    computed = figures["computed again"]
    others = [f"{name} {ms} ms" for name, ms in figures.items() if "kvtrie" in name]
    other = next(ms for name, ms in figures.items() if "vLLM" in name)
    return (
        "Time to first token of a chat of 2,000 tokens that returns: "
        f"computed again {computed:,} ms; {'; '.join(reversed(others))}; "
        f"vLLM's own offloading from host memory {other} ms."
    )


def closed_gap(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per cent of the way from LRU to Belady, in cost saved, by policy and room."""
    saved = {
        (row["policy"], row["room"]): row["cost_saved"]
        for row in record["rows"]
        if (row["trace"], row["structure"], row["tiers"]) == ("coding agents", "leaf-only", 1)
    }
    rooms = sorted({room for _, room in saved})

    def share(policy: str, room: int) -> float:
        least, most = saved["lru", room], saved["belady, leaves (ref)", room]
        return round(100 * (saved[policy, room] - least) / (most - least), 1)

    return {
        policy: {f"{room:,} blocks": share(policy, room) for room in rooms}
        for policy in ("learned", "flat", "retention")
    }


def draw_closed_gap(figures: dict[str, dict[str, float]]) -> Figure:
    """Draw groups of bars, one group per room."""
    learned = figures["learned"].values()
    ends = f"{min(learned):.0f} to {max(learned):.0f} %"
    drawn = figure(f"The default policy, learned, closes {ends} of the gap from LRU to Belady", 4.4)
    axes = drawn.subplots()
    for at, (policy, shares) in enumerate(figures.items()):
        places = [i + 0.27 * (at - 1) for i in range(len(shares))]
        colour = (OURS, OTHER, PLAIN)[at]
        bars = axes.bar(places, list(shares.values()), 0.25, color=colour, label=policy)
        axes.bar_label(bars, fmt="{:.0f} %", padding=2, color=INK, fontsize=9)
    axes.set_xticks(range(len(shares)), list(shares))
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("room of the tier (coding agents, blocks of 64 tokens, one tier)")
    axes.set_ylabel("share of the gap closed, %")
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def fusion(record: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Cost and recovered quality with its interval by curve; a point per share of tokens."""
    curves = {
        "plain reuse and full prefill": ("none 0.0",),
        "CacheBlend's selection": ("values 0.15, at 2",),
        "random tokens": ("random 0.15",),
        "kvtrie: first tokens of chunks": ("first 0.05", "first 0.15"),
        "kvtrie: with the question's attention": (
            "first+question 0.15, heed 12-19",
            "values+question 0.3, at 2, heed 12-19",
        ),
    }
    rows = {row["setting"]: row for row in record["rows"]}
    figures = {
        name: [
            [round(row["cost"], 3)]
            + [round(row["recovered"]["mean"][part], 3) for part in ("value", "low", "high")]
            for row in map(rows.__getitem__, settings)
        ]
        for name, settings in curves.items()
    }
    served = {row["what"]: row for row in record_of("fusion")["rows"]}["prefix reuse"]
    figures["prefix reuse"] = [[round(served["ours"] / served["peer"], 3), 1.0, 1.0, 1.0]]
    figures["plain reuse and full prefill"].append([1.0, 1.0, 1.0, 1.0])
    return figures


def draw_fusion(figures: dict[str, list[list[float]]]) -> Figure:
    """Draw quality over cost, a curve per selection, between plain reuse and a full prefill."""
    best = figures["kvtrie: with the question's attention"][-1]
    title = (
        f"Fusion recovers {best[1]:.0%} of a full prefill's quality at {best[0]:.0%} of its cost"
    )
    drawn = figure(title, 4.6)
    axes = drawn.subplots()
    colours = dict(zip(figures, (PLAIN, OTHER, SERVED, "#7fa6d6", OURS, INK), strict=True))
    for name, points in figures.items():
        costs, values, lows, highs = zip(*points, strict=True)
        line = "--" if name.startswith("plain") else "-"
        axes.plot(costs, values, line, marker="o", color=colours[name], label=name, markersize=7)
        axes.vlines(costs, lows, highs, color=colours[name], linewidth=1.5)
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("CPU time, share of a full prefill")
    axes.set_ylabel("recovered: 1 - KL / KL of plain reuse (95 %)")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return drawn


def advice(record: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """Blocks of host memory, and shares predicted and found there, by workload and policy."""
    figures: dict[str, dict[str, list[list[float]]]] = {}
    for row in record["rows"]:
        point = [row["host"], *(round(row[what], 4) for what in ("predicted", "found"))]
        figures.setdefault(row["workload"], {}).setdefault(row["policy"], []).append(point)
    return figures


def draw_advice(figures: dict[str, dict[str, list[list[float]]]]) -> Figure:
    """Draw predictions as lines and what servers found as points, a panel per workload."""
    drawn = figure("Tokens found on host: predicted from events, and served", 4.2)
    panels = drawn.subplots(1, len(figures), squeeze=False)[0]
    for axes, (workload, policies) in zip(panels, figures.items(), strict=True):
        for (policy, points), colour in zip(policies.items(), (OURS, SERVED), strict=True):
            hosts, predicted, found = zip(*points, strict=True)
            axes.plot(hosts, predicted, "-", color=colour)
            axes.plot(hosts, found, "o", color=colour, label=policy)
            axes.set_xticks(hosts)
        top = max(share for points in policies.values() for _, *pair in points for share in pair)
        axes.set_title(workload, color=INK, fontsize=11)
        axes.set_ylim(0, 1.1 * top)
        axes.set_xlabel("blocks of host memory")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return drawn


def stores(record: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """Machines, tokens computed in per cent and ms to the first token, by store and router."""
    figures: dict[str, dict[str, list[list[float]]]] = {}
    for row in record["rows"]:
        more = row["more"]
        if more["router"] != "round-robin":
            name = "with a shared store" if more["store"] else "each machine alone"
            point = [more["machines"], round(100 * row["ours"], 1), more["ttft_ms"]]
            figures.setdefault(name, {}).setdefault(more["router"], []).append(point)
    return figures


def draw_stores(figures: dict[str, dict[str, list[list[float]]]]) -> Figure:
    """Draw lines over machines, computed tokens on the left and times on the right."""
    drawn = figure("With a shared store the router no longer decides what is computed", 4.4)
    panels = drawn.subplots(1, 2)
    colours, marks = (PLAIN, OURS, OTHER), ("s", "o", "^")
    for (name, routers), style in zip(figures.items(), ("--", "-"), strict=True):
        for (router, points), colour, mark in zip(routers.items(), colours, marks, strict=True):
            across, *columns = zip(*points, strict=True)
            for axes, column in zip(panels, columns, strict=True):
                axes.plot(
                    across, column, style, color=colour, marker=mark, label=f"{router}, {name}"
                )
    machines = sorted({point[0] for routers in figures.values() for point in routers["hash"]})
    labels = ("prompt tokens computed, %", "ms to the first token, mean")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xscale("log", base=4)
        axes.set_xticks(machines, [str(each) for each in machines])
        axes.minorticks_off()
        axes.set_xlabel("machines (chats in proportion)")
        axes.set_ylabel(label)
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 100)
    panels[1].set_yscale("log")
    panels[1].set_ylim(bottom=50)
    panels[1].yaxis.set_major_formatter("{x:g}")
    panels[0].legend(frameon=False, fontsize=8)
    return drawn


def first_token_times(record: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """Median first-token times measured and predicted in seconds, by tiers and workload."""
    figures: dict[str, dict[str, list[list[float]]]] = {}
    for row in record["rows"]:
        point = [round(row[side]["median"], 4) for side in ("seen", "predicted")]
        figures.setdefault(row["tiers"], {}).setdefault(row["workload"], []).append(point)
    return figures


def draw_first_token_times(figures: dict[str, dict[str, list[list[float]]]]) -> Figure:
    """Draw a point per run, the diagonal, and a band of 15 % around it."""
    points = [point for each in figures.values() for runs in each.values() for point in runs]
    near = sum(abs(predicted / measured - 1) <= 0.15 for measured, predicted in points)
    title = f"{near} of {len(points)} runs: median first-token time within 15 % of the prediction"
    drawn = figure(title, 5)
    axes = drawn.subplots()
    ends = [0.8 * min(map(min, points)), 1.25 * max(map(max, points))]
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color="#eeeeee")
    for (tiers, workloads), colour in zip(figures.items(), (PLAIN, OURS, OTHER), strict=True):
        for (workload, runs), mark in zip(workloads.items(), "os^", strict=True):
            label = f"{workload}; {'without kvtrie' if tiers == 'none' else f'kvtrie, {tiers}'}"
            measured, predicted = zip(*runs, strict=True)
            axes.plot(measured, predicted, mark, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("measured, s (vLLM's CPU server, SmolLM2-135M)")
    axes.set_ylabel("predicted by kvtrie sim, s")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return drawn


PICTURES: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Figure]]] = {
    "first-token": ("engines", first_token, draw_first_token),
    "policies-agents": ("policies", closed_gap, draw_closed_gap),
    "fusion": ("eval_fusion", fusion, draw_fusion),
    "eval-advise": ("eval_advise", advice, draw_advice),
    "eval-times": ("eval_times", first_token_times, draw_first_token_times),
    "shared-store": ("sim_store", stores, draw_stores),
}
"""By picture: the record, the figures that are shown, and the function that draws them."""


def record_of(name: str) -> Any:
    """A record, by its name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def shown(name: str) -> Any:
    """The figures that a picture has to show, from its record."""
    record, figures_of, _ = PICTURES[name]
    return figures_of(record_of(record))


def draw(name: str, folder: Path = IMAGES) -> None:
    """Draw a picture again from its record."""
    figures = shown(name)
    out = io.BytesIO()
    metadata = {FIGURES: json.dumps(figures)}
    PICTURES[name][2](figures).savefig(out, dpi=110, format="png", metadata=metadata)
    write_output(folder / f"{name}.png", out.getvalue())


def main() -> int:
    """Draw every picture, and write the figures of the first one into README.md."""
    for name in PICTURES:
        draw(name)
    write_part(README, "first-token", caption(shown("first-token")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
