"""The answer of `kvtrie advise` as text."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.advise.advice import Advice, Question
    from kvtrie.advise.breakers import Breaker
    from kvtrie.advise.groups import Grouping
    from kvtrie.advise.outlook import Outlook
    from kvtrie.advise.window import Window
    from kvtrie.advise.worth import Worth

__all__ = ["advice_text", "size_text"]

_MIB = 2**20
_GIB = 2**30
_NS = 1e9
_SMALL = 10 * _GIB
_HEADS = ("policy", "host", "disk", "found", "prefill saved", "mean", "median", "helped")
_WIDTHS = (9, 10, 10, 9, 14, 10, 10, 8)


def size_text(size: int) -> str:
    """Return a size in the launcher's format, rounded up to a MiB or, from 10 GiB on, a GiB."""
    if size < _SMALL:
        return f"{math.ceil(size / _MIB)}MiB"
    return f"{math.ceil(size / _GIB)}GiB"


def advice_text(
    advice: Advice,
    question: Question,
    seen: Window | None,
    breakers: Sequence[Breaker] | None = None,
    played: Grouping | None = None,
) -> str:
    """Return the answer: the window, the table, breakers, the choice, and the command for it.

    Args:
        advice: the answer.
        question: the question.
        seen: the window. None for a trace.
        breakers: the top points of divergence. None without token ids.
        played: the groups of layers played apart. None for a trace.
    """
    lines = [*_window(advice, seen, played), *_shares(advice, question, seen), ""]
    lines.append(_row(_HEADS))
    lines += [_row(_cells(row)) for row in advice.rows]
    lines.append("")
    if any(row.saved is None for row in advice.rows):
        lines.append(
            "Times are not known without --metrics of a vLLM server or a profile with a model."
        )
    if any(row.beyond for row in advice.rows):
        lines.append("≥: larger than all that the window stored; a longer one may find more.")
    if advice.refused:
        lines.append(f"{advice.refused} requests are larger than the GPU cache as played.")
    lines += _worth(advice.worth)
    lines += _breakers(seen, breakers)
    half, chosen = advice.half, advice.chosen
    fewer = f"With a GPU cache half as large the GPU finds {_share(half.gpu)}"
    if chosen is None:
        lines += [f"Nothing to gain: {advice.nothing}.", f"{fewer}."]
        return "\n".join(lines) + "\n"
    best = f"{_named(chosen)} finds {_share(chosen.found)} of prompt tokens"
    both = f"these tiers {_share(half.found)}; the GPU alone {_share(advice.half_gpu_alone)}"
    lines += [f"Smallest size within 1 point of the largest: {best}.", f"{fewer} and {both}."]
    lines += ["", _launch(chosen, seen)]
    return "\n".join(lines) + "\n"


def _worth(worth: Worth) -> list[str]:
    """Return the savings per GB of host memory and of a disk."""
    lines = ["", "Sizes worth their price, by the share of all prefill computation that they save:"]
    widths = (9, 10, 10, 9, 16, 14)
    heads = ("policy", "host", "disk", "saved", "per GB of host", "per GB of disk")
    lines.append(_row(heads, widths))
    for step in worth.steps:
        per_disk = "–" if step.per_disk_gb is None else f"{100 * step.per_disk_gb:.3f}"
        cells = (step.policy, size_text(step.host), size_text(step.disk) if step.disk else "–")
        cells = (*cells, _share(step.cost), f"{100 * step.per_host_gb:.3f}", per_disk)
        lines.append(_row(cells, widths))
    lines.append(
        "Points of that share per GB: of host beyond the size above, of disk for this host."
    )
    for policy, size in worth.knees.items():
        lines.append(
            f"The curve of {policy} bends at host {size_text(size)}: more adds less per GB."
        )
    if worth.equal is not None:
        lines.append(
            f"With host {size_text(worth.equal)} learned saves as much as lru with the largest."
        )
    return [*lines, ""]


def _breakers(seen: Window | None, breakers: Sequence[Breaker] | None) -> list[str]:
    if seen is None:
        return []
    if breakers is None:
        return ["Top breakers need token ids: --keep-tokens."]
    if not breakers:
        return ["No prompt diverged from an earlier one."]
    lines = ["Top breakers, by tokens that are computed though an earlier prompt has them:"]
    for at, one in enumerate(breakers, 1):
        lines.append(
            f"{at}. {one.recurring} tokens of {one.requests} requests that part at token "
            f"{one.position} of {one.tokens}: cached {one.cached[:4]}, asked {one.asked[:4]}"
        )
    return lines


def _window(advice: Advice, seen: Window | None, played: Grouping | None) -> list[str]:
    window = advice.window
    about = (
        f"{window.requests} requests in {window.end / _NS:.0f} s; the last {window.counted}, "
        f"from {window.since / _NS:.0f} s on, are counted"
    )
    if seen is None:
        return [f"{about}."]
    rebuilt = seen.rebuilt
    stored = f"{rebuilt.stored} blocks of {rebuilt.size} tokens stored, {rebuilt.distinct} distinct"
    lines = [f"{about}. {stored}; {rebuilt.unknown} unknown parents."]
    if rebuilt.lost:
        count = sum(last - first + 1 for first, last in rebuilt.lost)
        spans = ", ".join(f"{first}–{last}" for first, last in rebuilt.lost[:4])
        more = ", …" if len(rebuilt.lost) > 4 else ""  # noqa: PLR2004 - as sliced above
        lines.append(f"Lost sequence numbers: {count} ({spans}{more}).")
    if rebuilt.forgotten:
        lines.append(f"The first {rebuilt.forgotten} requests were dropped for memory.")
    if rebuilt.cleared:
        lines.append(f"The engine dropped all blocks {rebuilt.cleared} times.")
    if played is not None and played.groups:
        named = Counter(str(one) for one in played.groups)
        listed = ", ".join(f"{count} of {one}" for one, count in sorted(named.items()))
        lines.append(
            f"Groups of layers besides full attention: {listed}. A prefix counts up to the deepest "
            f"border of {played.block_tokens} tokens at which all of them are there. Sizes are "
            "those of tiers that keep these groups apart."
        )
    elif seen.groups.events:
        lines.append(
            f"Warning: a model with several groups of layers: {seen.groups.events} events of other "
            "groups than full attention are left out, and sizes are those of that group; --model "
            "DIR plays all groups."
        )
    return lines


def _shares(advice: Advice, question: Question, seen: Window | None) -> list[str]:
    of = "rebuilt requests, which leave out those that the GPU held whole"
    if question.traffic is not None:
        of = f"all prompts, by the metrics; {100 * question.coverage:.1f} % of them are rebuilt"
    elif seen is None:
        of = "the trace"
    found = f"The GPU finds {_share(advice.gpu)} of prompt tokens"
    lines = [f"{found}, a cache of any size {_share(advice.most)}. Shares are of {of}."]
    if question.traffic is not None and question.traffic.gpu_hits is not None:
        lines[0] += f" The server counts {_share(question.traffic.gpu_hits)} on the GPU."
    if seen is not None and not seen.knows_gpu():
        lines.append(
            f"The GPU cache is taken to be {size_text(question.gpu)}; --metrics or --gpu gives its "
            "size."
        )
    return lines


def _cells(row: Outlook) -> tuple[str, ...]:
    return (
        row.policy,
        size_text(row.host),
        size_text(row.disk) if row.disk else "–",
        ("≥ " if row.beyond else "") + _share(row.found),
        "–" if row.saved is None else _share(row.saved),
        _seconds(row.ttft_mean_s),
        _seconds(row.ttft_median_s),
        _share(row.helped),
    )


def _row(cells: tuple[str, ...], widths: tuple[int, ...] = _WIDTHS) -> str:
    first, *others = zip(cells, widths, strict=True)
    left = f"{first[0]:{first[1]}}"
    return left + "".join(f" {cell:>{width}}" for cell, width in others)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _named(row: Outlook) -> str:
    disk = f" with disk {size_text(row.disk)}" if row.disk else ""
    return f"host {size_text(row.host)}{disk}, policy {row.policy},"


def _launch(chosen: Outlook, seen: Window | None) -> str:
    """Return the command for a server with these tiers."""
    counters = (seen.after if seen is not None else None) or {}
    host, disk = size_text(chosen.host), size_text(chosen.disk)
    if "gpu_tokens" not in counters:
        more = f" --disk PATH:{disk}" if chosen.disk else ""
        return f"kvtrie vllm MODEL --host {host}{more} --policy {chosen.policy}"
    if chosen.disk:
        return f"kvtrie sglang MODEL --host {host} --disk PATH:{disk}"
    gigabytes = math.ceil(chosen.host / 1e9)
    return f"sglang serve --model-path MODEL --enable-hierarchical-cache --hicache-size {gigabytes}"
