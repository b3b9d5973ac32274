"""Headline: the key figures for comparing runs, and all figures as a row.

Invariant: a missing figure is None, never 0. Cost: a few divisions per run.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any, cast

from kvtrie.output import writing_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["headline", "ratios", "row_of", "write_csv"]

_NS_PER_MS = 1e6


def headline(figures: dict[str, Any]) -> dict[str, float | None]:
    """Return the hit share, times in ms, served requests per second, goodput and cost."""
    prompt_tokens = sum(figures["hit_tokens"].values()) + figures["computed_tokens"]
    found = sum(figures["hit_tokens"].values()) / prompt_tokens if prompt_tokens else None
    served = figures["requests"] - figures["refused"]

    def time(name: str, part: str) -> float | None:
        spread = figures[name]
        return None if spread is None else spread[part] / _NS_PER_MS

    goodput, cost = figures["goodput"], figures["cost"]
    return {
        "found": found,
        "ttft_mean_ms": time("ttft_ns", "mean"),
        "ttft_p50_ms": time("ttft_ns", "p50"),
        "ttft_p99_ms": time("ttft_ns", "p99"),
        "tpot_mean_ms": time("tpot_ns", "mean"),
        "e2e_p99_ms": time("e2e_ns", "p99"),
        "requests_per_s": served * 1e9 / figures["end_ns"] if figures["end_ns"] else None,
        "goodput_per_s": None if goodput is None else goodput["per_s"],
        "per_million_tokens": None if cost is None else cost["per_million_tokens"],
    }


def ratios(
    first: dict[str, float | None], other: dict[str, float | None]
) -> dict[str, float | None]:
    """Return a run's headlines relative to the first run, or None if either is missing or 0."""
    return {
        name: value / base if (base := first[name]) and value is not None else None
        for name, value in other.items()
    }


def row_of(values: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Return a run as a row: its settings, then its figures with dotted keys.

    Tiers are keyed by kind and lanes by name.
    """
    flat: dict[str, Any] = dict(values)

    def put(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, each in cast("dict[str, Any]", value).items():
                put(f"{name}.{key}", each)
        else:
            flat[name] = value

    for name, value in figures.items():
        if name == "tiers":
            for tier in value:
                put(f"tiers.{tier['kind']}", {k: v for k, v in tier.items() if k != "kind"})
        else:
            put(name, value)
    return flat


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows, with a column for each key of any row.

    Raises:
        ConfigError: the file cannot be written.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with writing_text(path) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
