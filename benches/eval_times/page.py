"""Tables of `eval-times`: errors of the simulation per run, goals, and errors without each term.

Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["page"]

ERRORS = ("median", "mean", "p90", "token", "whole")
HEADS = (
    "Below vLLM | Load | Requests | First token: median, s | mean, s | 90th percentile, s "
    "| Error: median | mean | 90th percentile | per token | to the last token "
    "| Found: GPU / host / disk, % | Points off | Waiting: server / simulator"
)
SUMMARY = {
    "median": "Error of the median first-token time: median of the runs",
    "worst": "worst run",
    "high": "median of the runs above 80 % load",
    "points": "Tokens found, points off: worst run",
}


def page(
    record: dict[str, Any], grid: Callable[[str, list[tuple[str, ...]]], str], when: str
) -> str:
    """Return the tables of a record as Markdown.

    Args:
        record: as `document` returns it.
        grid: makes a table of heads and rows.
        when: date and machine, for the first head.
    """
    rows = [
        (
            *(row["workload"], row["tiers"], f"{row['load']:.0%}", f"{row['requests']}"),
            *(f"{row['seen'][name]:.3f}" for name in ERRORS[:3]),
            *(f"{row['errors'][name]:+.0%}" for name in ERRORS),
            " / ".join(f"{share:.1f}" for share in row["found"].values()),
            f"{row['points']:.2f}",
            " / ".join(f"{each:.2f}" for each in row["queue"]),
        )
        for row in record["rows"]
    ]
    goals = [
        (what, f"{record['goals'][name]:g}", f"{record['summary'][name]:.3g}")
        for name, what in SUMMARY.items()
    ]
    terms = [(term, f"{value:.1%}") for term, value in record["terms"].items()]
    return "\n\n".join(
        (
            grid(f"Workload {when} | {HEADS}", rows),
            grid("Figure | Goal, at most | Measured", goals),
            grid("Term left out | Error of the median first-token time, median of runs", terms),
        )
    )
