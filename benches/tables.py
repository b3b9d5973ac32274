"""The tables of documentation pages, from the records in `benches/results`.

    python -m benches.tables

A command that writes a record renders its table too. Cost: none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benches.eval_times import page as times
from benches.pages import write_part
from benches.policies import page as policies

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs/benchmarks.md"
EVALUATIONS = ROOT / "docs/evaluations.md"
POLICIES = ROOT / "docs/policies.md"
SIMULATOR = ROOT / "docs/simulator.md"
RESULTS = ROOT / "benches/results"
EVALUATED = (
    "formats",
    "eval_fusion",
    "fusion",
    "eval_train",
    "train",
    "selective_eval",
    "selective",
    "reproductions",
    "eval_why",
    "eval_advise",
)
LEFT_OUT = {
    "core": (
        ".int32",
        ".int64",
        ".list",
        "evict.retention",
        "memory.lru",
        "memory.retention",
        "find.10",
        "lookup.p99",
        "store.16",
    ),
    "fusion": ("ranking", "KL", "prefix reuse"),
    "selective": ("padded", "memory of a value", "keydiff", "attend 1", "attend 5", "bookkeeping"),
    "reproductions": ("A3", "A41"),
}
"""Rows that a record has and the page does not, in addition to those without a peer."""


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def grid(heads: str, rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; `heads` are separated by `|`."""
    lines = [f"| {heads} |", "|---" * (heads.count("|") + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def when(place: dict[str, Any]) -> str:
    """Date, machine and model of a record, for a table's first head."""
    words = [place["date"][:10], f"{place['cores']} cores ({place['cpu']})"]
    words += [f"load {place['load'][0]:g}"]
    words += [f"{place['policy']} policy"] if "policy" in place else []
    words += [f"torch {place['torch'].partition('+')[0]}"] if "torch" in place else []
    return f"({', '.join(words)})"


def results(name: str) -> Callable[[dict[str, Any]], str]:
    """A renderer of records of the common form: a line per figure, with all its peers."""

    def render(record: dict[str, Any]) -> str:
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in record["rows"]:
            left_out = any(part in row["what"] for part in LEFT_OUT.get(name, ()))
            if row["peer"] is not None and not left_out:
                lines.setdefault(row["what"], []).append(row)
        return grid(
            f"Row {when(record['place'])} | Ours | Peer (ratio, above 1 ours is better) | Goal",
            [
                (
                    what.replace("beside", "and"),
                    f"{number(rows[0]['ours'])} {rows[0]['unit'].replace('us', 'µs')}",
                    "<br>".join(
                        f"{row['peer_name']} {number(row['peer'])} ({number(row['ratio'])})"
                        for row in rows
                    ),
                    "<br>".join(
                        number(row["goal"]) + ("" if row["ok"] else ", **missed**")
                        for row in rows
                        if row["goal"] is not None
                    )
                    or "-",
                )
                for what, rows in lines.items()
            ],
        )

    return render


def disk(record: dict[str, Any]) -> str:
    """Blocks of both sizes, read and written, next to fio's."""
    about, rows = record["place"], record["rows"]
    more = [row["more"] for row in rows]
    loads = [each["load"] for each in more]
    head = (
        f"{about['date'][:10]}, {about['cores']} cores ({about['cpu']}), "
        f"{about['data_bytes'] >> 30} GiB of data, {about['file_system']}, queue "
        f"{about['queue']}, {more[0]['pairs']} pairs of {more[0]['seconds']} s, "
        f"page cache {'' if more[0]['page_cache_dropped'] else 'not '}dropped before each "
        f"run. Load average, including this benchmark: {min(loads)} to {max(loads)}."
    )
    table = grid(
        "Blocks | | I/O | Depth | Ours, GB/s | fio, GB/s | Ratio, median (quartiles) "
        "| Goal | Cores used: ours, fio",
        [
            (
                *(f"{row['more'][name]}" for name in ("size", "verb", "io", "depth")),
                *(f"{row[side] / 1e9:.2f}" for side in ("ours", "peer")),
                "{:.3f} ({ratio_low:.3f} to {ratio_high:.3f})".format(row["ratio"], **row["more"]),
                f"{row['goal'] or '-'}",
                "{ours_cpu:.2f}, {fio_cpu:.2f}".format(**row["more"]),
            )
            for row in rows
        ],
    )
    return f"{head}\n\n{table}"


def engines(record: dict[str, Any]) -> str:
    """First tokens by server, and the ratios with their goals."""
    servers = [
        (
            name,
            f"{1e3 * median(row['computed_s']):,.0f} ms" if row["computed_s"] else "-",
            f"{1e3 * median(took for took, _ in row['found']):,.0f} ms" if row["found"] else "-",
        )
        for name, row in record["servers"].items()
    ]
    most = record.get("most", {})
    goals = [
        (
            name.replace("beside", "own"),
            number(ratio),
            f"at most {number(most[name])}" + ("" if ratio <= most[name] else ", **missed**")
            if name in most
            else number(record["goals"][name])
            + ("" if ratio >= record["goals"][name] else ", **missed**"),
        )
        for name, ratio in record["ratios"].items()
    ]
    if many := record.get("many"):
        differ, missed = many["different"], ", **missed**" if many["different"] else ""
        what = f"answers that differ, of {many['requests']:,} with {many['at_once']} at once"
        goals.append((what, f"{differ}", f"0{missed}"))
    first = grid("Server | First token, computed | First token, returning", servers)
    return f"{first}\n\n{grid('Ratio | Seen | Goal', goals)}"


def scaling(record: dict[str, Any]) -> str:
    """Median microseconds of each call by blocks."""
    peers = {(row["peer"], row["blocks"]): row for row in record["peers"]}
    names = sorted({name for name, _ in peers}, reverse=True)

    def cell(row: dict[str, Any], call: str) -> str:
        others = [(name, peers.get((name, row["blocks"]))) for name in names]
        beyond = [f"{name} {number(other[call])}" for name, other in others if other]
        return number(row[call]) + (f" ({', '.join(beyond)})" if beyond else "")

    return grid(
        f"Blocks {when(record['context'])} | lookup of 32, µs | acquire and release, µs (peers) "
        "| evict 32, insert 32, µs (peers) | commit of a token, µs",
        [
            (
                f"{row['blocks']:,}",
                number(row["lookup"]),
                *(cell(row, call) for call in ("hit", "replace")),
                number(row["token"]),
            )
            for row in record["rows"]
        ],
    )


def formats(record: dict[str, Any]) -> str:
    """How far logits move, by the format of a host tier."""
    return grid(
        f"Host tier {when(record['about'])} | Bytes of a block | Error of logits | KL, nats "
        "| Same best token | Perplexity",
        [
            (
                name,
                f"{row['bytes of a block']:,}",
                number(row["error of logits"]),
                number(row["divergence"]),
                f"{row['same best token']:.1%}",
                f"{row['perplexity']:.2f}",
            )
            for name, row in record["formats"].items()
        ],
    )


def eval_fusion(record: dict[str, Any]) -> str:
    """Recovered share by selection, and its cost."""
    kinds = ("split", "header", "local", "text")
    return grid(
        f"Selection {when(record['about'])} | Mean [95 %] | split | header | local | text | Cost",
        [
            (
                row["setting"].replace("heed", "question at"),
                "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["recovered"]["mean"]),
                *(f"{row['recovered'][kind]['value']:.2f}" for kind in kinds),
                f"{row['cost']:.2f}",
            )
            for row in record["rows"]
        ],
    )


def eval_train(record: dict[str, Any]) -> str:
    """Exact matches by arm."""
    return grid(
        f"Arm {when(record['place'])} | Exact matches, 95 % | Goal",
        [
            (
                row["what"],
                f"{row['ours']:g} ± {row['more']['half']:g} {row['unit']}",
                "-" if row["goal"] is None else f"{row['goal']:g}{'' if row['ok'] else ', missed'}",
            )
            for row in record["rows"]
        ],
    )


def eval_why(record: dict[str, Any]) -> str:
    """The cause and the token of each break."""
    return grid(
        f"Break {when(record['about'])} | Expected | Computed tokens by cause | Recurring "
        "| Differs at token | Explained at",
        [
            (
                row["kind"],
                row["expected"] + ("" if row["right"] else ", **missed**"),
                ", ".join(f"{cause} {count}" for cause, count in row["causes"].items()),
                f"{row['recurring']}",
                f"{row['token']}",
                f"{row['at']}",
            )
            for row in record["rows"]
        ],
    )


def eval_advise(record: dict[str, Any]) -> str:
    """Shares of tokens found on host and of prefill times saved, served and predicted."""
    points, percent = record["goals"]

    def guess(row: dict[str, Any], name: str, off: str, most: float) -> str:
        return f"{100 * row[name]:.1f} %" + ("" if abs(row[off]) <= most else ", **missed**")

    return grid(
        f"Workload {when(record['about'])} | Policy | Host, blocks | Requests | GPU "
        "| Found on host | Predicted | Prefill saved | Predicted",
        [
            (
                row["workload"],
                row["policy"],
                f"{row['host']}",
                f"{row['requests']}",
                f"{100 * row['gpu']:.1f} %",
                f"{100 * row['found']:.1f} %",
                guess(row, "predicted", "points", points),
                f"{100 * row['saved']:.1f} %",
                guess(row, "saved_predicted", "percent", percent),
            )
            for row in record["rows"]
        ],
    )


def selective_eval(record: dict[str, Any]) -> str:
    """The three best rows per kind and share of rows kept."""
    shown = []
    for kind, best in (("text", 1), ("facts", -1)):
        for budget in ("1/2", "1/4"):
            rows = [row for row in record["rows"] if (row["kind"], row["budget"]) == (kind, budget)]
            for row in sorted(rows, key=lambda row: best * row["mean"])[:2]:
                name = ", ".join(filter(None, (row["policy"], row["setting"], row["buffers"])))
                shown.append((kind, budget, name, f"{row['mean']:.3f} ± {row['half']:.3f}"))
    return grid(f"Kind {when(record['about'])} | Rows kept | Policy | Mean, 95 %", shown)


def sharing(record: dict[str, Any]) -> str:
    """What probers guess by mode and accounts; tokens found by room and mode, and the goals."""
    rows = {row["what"]: row for row in record["rows"]}
    attacks = [row for what, row in rows.items() if what.startswith("attack")]
    probed = [
        (
            f"`{more['mode']}`" if "=" in more["mode"] else more["mode"],
            str(more["accounts"]),
            f"{row['ours']:.1%}",
            "" if row["goal"] is None else f"at most {row['goal']:.1%}: {reached(row)}",
        )
        for row in attacks
        for more in (row["more"],)
    ]
    found = [row for what, row in rows.items() if what.startswith("hits")]
    modes = list(dict.fromkeys(row["more"]["mode"] for row in found))
    lines: list[tuple[str, ...]] = []
    for room in dict.fromkeys(row["more"]["room"] for row in found):
        lost = rows[f"goal: {room} blocks, lost at share_after=3"]
        kept = rows[f"goal: {room} blocks, gain over salts that share_after=3 keeps"]
        lines.append(
            (
                f"{room:,} blocks",
                *(f"{rows[f'hits: {room} blocks, {mode}']['ours']:.1%}" for mode in modes),
                f"{100 * lost['ours']:.2f} points, {reached(lost)}",
                f"{kept['ours']:.0%}, {reached(kept)}",
            )
        )
    goals = "Lost at 3 (goal 2 points) | Gain over salts kept at 3 (goal 80 %)"
    heads = f"Room | {' | '.join(modes)} | {goals}"
    guessed = grid("Sharing | Accounts | Tokens guessed | Chance and three deviations", probed)
    return f"{guessed}\n\n{grid(heads, lines)}"


def reached(row: dict[str, Any]) -> str:
    """Whether a row's goal is reached, in a word."""
    return "reached" if row["ok"] else "**missed**"


def sim_store(record: dict[str, Any]) -> str:
    """Prompt tokens computed by router, machines and store."""
    rows = [row["more"] for row in record["rows"]]
    found = {(row["machines"], row["router"], row["store"]): row for row in rows}
    shown = [(machines, store) for machines in (4, 16) for store in (False, True)]
    heads = [f"{machines} machines{', store' * store}" for machines, store in shown]

    def cell(router: str, machines: int, store: bool) -> str:  # noqa: FBT001 - a key
        row = found[machines, router, store]
        share = row["computed"] / row["prompt"]
        return f"{row['computed'] / 1e6:.2f} M ({share:.0%}), {row['ttft_ms']:,.0f} ms"

    lines = [
        (f"`{router}`", *(cell(router, *key) for key in shown))
        for router in ("round-robin", "hash", "locality", "score")
    ]
    return grid(f"Router | {' | '.join(heads)}", lines)


def sim_progress(record: dict[str, Any]) -> str:
    """First tokens after tool calls by room, policy and reports, and the goals."""
    rows = [row for row in record["rows"] if not row["what"].startswith("goal")]
    lines = [
        (
            f"{more['host']:,}",
            f"`{more['policy']}`{', reports' * more['reports']}",
            *(f"{share:.1%}" for share in (more["found_on_gpu"], more["computed"])),
            *(f"{figure:.2f}" for figure in (more["p50_s"], row["ours"], more["p99_s"])),
        )
        for row in rows
        for more in (row["more"],)
    ]
    goals = [
        (
            row["what"].removeprefix("goal: "),
            f"−{1 - 1 / row['goal']:.0%}",
            f"{row['ours'] / row['peer'] - 1:+.0%}".replace("-", "−"),
            "reached" if row["ok"] else "missed",
        )
        for row in record["rows"]
        if row["what"].startswith("goal")
    ]
    heads = "Host, blocks | Policy | Found on `gpu` | Computed | p50, s | p90, s | p99, s"
    compared = grid("p90 of `learned` with reports | Goal | Measured | ", goals)
    return f"{grid(heads, lines)}\n\n{compared}"


def sim_reading(record: dict[str, Any]) -> str:
    """Speed, size of a line and memory by form of a trace."""
    lines = [
        (
            row["what"],
            f"{row['ours'] / 1000:,.0f} 000",
            "-" if row["goal"] is None else f"{row['goal'] / 1000:,.0f} 000, {reached(row)}",
            f"{row['more']['requests']:,}",
            *(f"{row['more'][name]:g}" for name in ("hashes", "line_bytes", "memory_mb")),
        )
        for row in record["rows"]
    ]
    heads = (
        f"Form {when(record['place'])} | Requests/s | Goal | Requests | Hashes | Bytes of a line"
    )
    heads += " | MB held"
    return grid(heads, lines)


def sim_curves(record: dict[str, Any]) -> str:
    """Time and accuracy of the curve per trace."""
    rows = record["rows"]
    return grid(
        f"Trace {when(record['place'])} | Requests, blocks of prompts | Capacities | One pass, s "
        "| Two replays, s | Most points off",
        [
            (
                row["what"],
                f"{row['more']['requests']:,}, {row['more']['blocks']:,}",
                "{}, {:,} to {:,}".format(
                    len(row["more"]["capacities"]),
                    row["more"]["capacities"][0],
                    row["more"]["capacities"][-1],
                ),
                f"{number(row['ours'])}{'' if row['ok'] else ', **missed**'}",
                number(row["peer"]),
                f"{row['more']['worst']:.2f}",
            )
            for row in rows
        ],
    )


def sim_prefetch(record: dict[str, Any]) -> str:
    """Host memory of prefetched blocks and first tokens after tool calls by room and hint."""
    names = {
        "prefetch-now": "`Prefetch` halfway",
        "progress": "`Progress`",
        "prefetch": "`Prefetch` with a deadline",
    }
    rows = [row for row in record["rows"] if not row["what"].startswith("goal")]
    late = {row["more"]["host"]: row["ours"] for row in rows if row["more"]["hint"] == "prefetch"}
    lines = [
        (
            f"{more['host']:,}",
            names[more["hint"]],
            f"{row['ours']:,.0f}",
            f"{late[more['host']] / row['ours']:.2f}",
            f"{more['found_on_host']:.1%}",
            *(f"{more[name]:.2f}" for name in ("p50_s", "p95_s", "mean_s")),
        )
        for row in rows
        for more in (row["more"],)
    ]
    goals = [
        (
            row["what"].removeprefix("goal: "),
            f"≤ {1 / row['goal']:.2f}, p95 within 2%",
            f"{1 / row['ratio']:.2f}",
            "reached" if row["ok"] else "missed",
        )
        for row in record["rows"]
        if row["what"].startswith("goal")
    ]
    heads = "Host, blocks | Hint | Held, GB·s | Late / this | Found on `host`"
    rows_of = grid(f"{heads} | p50, s | p95, s | Mean, s", lines)
    compared = grid("`Prefetch` with a deadline | Goal | Measured | ", goals)
    return f"{rows_of}\n\n{compared}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    **{
        name: results(name)
        for name in (
            *("core", "transfer", "fusion", "selective", "train", "sim", "hybrid", "remote"),
            "cluster",
            "engines_hybrid",
        )
    },
    "reproductions": results("reproductions"),
    "disk": disk,
    "engines": engines,
    "scaling": scaling,
    "formats": formats,
    "eval_fusion": eval_fusion,
    "eval_train": eval_train,
    "eval_why": eval_why,
    "eval_advise": eval_advise,
    "eval_times": lambda record: times.page(record, grid, when(record["about"])),
    "selective_eval": selective_eval,
    "sim_progress": sim_progress,
    "sim_reading": sim_reading,
    "sim_prefetch": sim_prefetch,
    "sharing": sharing,
    "sim_store": sim_store,
    "sim_curves": sim_curves,
    "policies": lambda record: policies.page(record, grid),
}
"""By record: the function that renders its table."""


def page(name: str) -> Path:
    """The page that has the table of a record."""
    if name in {"policies", "sim_progress", "sim_prefetch"}:
        return POLICIES
    if name in {"sim_store", "sim_reading", "sim_curves", "eval_times"}:
        return SIMULATOR
    return EVALUATIONS if name in EVALUATED else BENCHMARKS


def rendered(name: str) -> str:
    """The table of a record, as it is now."""
    return TABLES[name](json.loads((RESULTS / f"{name}.json").read_text())).strip()


def main() -> int:
    """Render every table into the page."""
    for name in TABLES:
        write_part(page(name), name, rendered(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
