"""The tables of `docs/policies.md`, from the record: one per shape, shares of rooms, missed goals.

Invariant: a policy that lacks a room or a seed of a line has no figure there, and no mean. Cost:
none.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from benches.policies.cells import BALANCED, ENGINE, HITS, LEAVES, SHORT, Row
from benches.policies.equal import Share
from benches.policies.finds import CORE, ONLINE, SECOND
from benches.policies.goals import Figures, Goal, share_means, short_figures
from benches.policies.short import PEERS
from benches.policies.traces import AGENTS, COMMON, CONVERSATION
from benches.policies.waits import DIRECT, GIVEN, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Line = tuple[str, ...]
LEARNED = ("learned", "learned" + BALANCED)
ONE_TIER = ("lru", "flat", "retention", *LEARNED, "learned" + HITS, LEAVES)
BELOW = ("lru", "retention", *LEARNED)
SINGLE = ("lru", "retention", "learned", *PEERS)
# Traces whose rooms have separate lines on one tier.
APART = (AGENTS, COMMON)
NONE = "–"


def page(record: dict[str, Any], grid: Callable[[str, list[Line]], str]) -> str:
    """All tables of a record; `grid` makes one of heads and lines."""
    rows = [Row(**row) for row in record["rows"]]
    shares = [Share(**share) for share in record["shares"]]
    times = [Wait(**wait) for wait in record["waits"]]
    goals = [Goal(**{key: goal[key] for key in goal if key != "ok"}) for goal in record["goals"]]
    traces = dict.fromkeys(row.trace for row in rows)
    one, below = Figures(rows, "leaf-only", 1), Figures(rows, ENGINE, 2)
    parts = [
        (
            f"One tier, leaf-only ({seeds(rows, 'leaf-only')})",
            grid(
                heads("Trace, room", ONE_TIER),
                shape(one, ONE_TIER, APART),
            ),
        ),
        (
            f"Host below an engine's own `lru` ({seeds(rows, ENGINE)})",
            grid(heads("Trace", BELOW), shape(below, BELOW, ())),
        ),
        (
            f"Short prompts, one block each: blocks found in per cent ({seeds(rows, SHORT)})",
            grid(heads("Stream", SINGLE), singles(rows)),
        ),
        (
            "Share of the room of `lru` in which `learned` saves its cost / finds its blocks",
            grid("Trace | one tier | host below an engine", rooms(shares)),
        ),
        (
            "Online policies on the second half of each trace, one tier (seed 0, middle room)",
            grid(heads("Trace, room", ONLINE), shape(Figures(rows, SECOND, 1), ONLINE, traces)),
        ),
        (
            "Seconds to the first token, mean / median / 90th percentile: kvtrie's policies",
            grid(heads("Trace, load", CORE), seconds(times, DIRECT, CORE)),
        ),
        (
            "The same with room for all, where each prompt finds what a policy finds in the room",
            grid(heads("Trace, load", ONLINE), seconds(times, GIVEN, ONLINE)),
        ),
        (
            f"{sum(goal.ok for goal in goals)} of {len(goals)} goals are reached; the others:",
            grid("Goal | At least | Reached | Where", [line(g) for g in goals if not g.ok]),
        ),
    ]
    date = f"Cost saved / blocks found in per cent; record of {record['date']}."
    return "\n\n".join([date, *(f"**{title}**\n\n{table}" for title, table in parts)])


def heads(first: str, policies: Iterable[str]) -> str:
    """The first line of a table."""
    names = {LEAVES: "Belady, leaves", **{name: name for name in PEERS}}
    return " | ".join([first, *(names.get(name, f"`{name}`") for name in policies)])


def seeds(rows: Iterable[Row], structure: str) -> str:
    """The number of seeds of made-up traces, and those that have fewer."""
    found: dict[str, set[int]] = {}
    for row in rows:
        if row.structure == structure and row.trace not in {AGENTS, CONVERSATION}:
            found.setdefault(row.trace, set()).add(row.seed)
    most = max(map(len, found.values()), default=1)
    fewer = [f"{name} {len(seeds)}" for name, seeds in found.items() if len(seeds) < most]
    return "; ".join([f"{most} seeds" if most > 1 else "1 seed", *fewer])


def pair(figures: tuple[float, float]) -> str:
    """Cost saved and blocks found."""
    return f"{figures[0]:.1f} / {figures[1]:.1f}"


def shape(figures: Figures, policies: Iterable[str], apart: Iterable[str]) -> list[Line]:
    """Means over the rooms of each trace, or its rooms if they are apart, and the mean of all."""
    keys = list(dict.fromkeys(key for name in figures.policies() for key in figures.keys(name)))
    if not keys:
        return []
    whole = {name: figures.complete(name) for name in policies}
    lines: list[Line] = []
    for trace in dict.fromkeys(name for name, _ in keys):
        rooms = [key for key in keys if key[0] == trace]
        if trace in apart:
            for key in rooms:
                cells = (pair(figures.cell(p, key)) if key in whole[p] else NONE for p in policies)
                lines.append((f"{trace}, {key[1]:,}", *cells))
            continue
        means = (
            pair(figures.trace(p, trace)) if whole[p].issuperset(rooms) else NONE for p in policies
        )
        lines.append((f"{trace}, {len(rooms)} room{'s' if len(rooms) > 1 else ''}", *means))
    means = (pair(figures.mean(p)) if whole[p].issuperset(keys) else NONE for p in policies)
    return [*lines, ("mean of the traces", *means)]


def singles(rows: list[Row]) -> list[Line]:
    """Hits on streams of single blocks: means over their rooms."""
    streams: dict[str, list[dict[str, float]]] = {}
    for (name, _), hits in short_figures(rows).items():
        streams.setdefault(name, []).append(hits)

    def mean(each: list[dict[str, float]], policy: str) -> str:
        whole = all(policy in hits for hits in each)
        return f"{fmean(hits[policy] for hits in each):.1f}" if whole else NONE

    return [(name, *(mean(each, policy) for policy in SINGLE)) for name, each in streams.items()]


def seconds(times: list[Wait], structure: str, policies: Iterable[str]) -> list[Line]:
    """A line per trace and load."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for time in times:
        if time.structure == structure:
            three = (time.mean, time.p50, time.p90)
            text = " / ".join(f"{each:.3g}" for each in three)
            cells.setdefault((time.trace, time.load), {})[time.policy] = text
    return [
        (f"{trace}, {load} %", *(found.get(policy, NONE) for policy in policies))
        for (trace, load), found in cells.items()
    ]


def rooms(shares: list[Share]) -> list[Line]:
    """A line per trace, and the mean."""
    shapes = [share_means(shares, structure) for structure in ("leaf-only", ENGINE)]
    names = dict.fromkeys(name for means in shapes for name in means)
    lines = [
        (name, *(" / ".join(f"{x:.2f}" for x in means.get(name, ())) or NONE for means in shapes))
        for name in names
    ]
    means = (
        " / ".join(f"{fmean(pair[at] for pair in means.values()):.2f}" for at in (0, 1))
        if means
        else NONE
        for means in shapes
    )
    return [*lines, ("mean", *means)]


def line(goal: Goal) -> Line:
    """A goal that is missed."""
    return (goal.what, f"{goal.wanted:g}", f"{goal.reached:.3f}", goal.where or "-")
