"""Terms of the engine's model, and errors of predictions.

Invariant: an error is relative to the measured figure; tokens found are in points of the prompts.
Cost: none.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benches.eval_times.predict import Figures
    from kvtrie.sim.config import SimulationConfig

__all__ = ["GOALS", "TERMS", "errors", "summary"]

HIGH = 0.8
GOALS = {"median": 0.15, "worst": 0.3, "high": 0.25, "points": 2.0}
FAST = {"bytes_per_s": 1e15, "latency_ns": 0}


def _priced(config: SimulationConfig, *parts: Any) -> SimulationConfig:
    """The same run with other step times: base, prefills, decodes, time outside of steps."""
    return replace(config, price=parts, machines=())


def _no_request(config: SimulationConfig) -> SimulationConfig:
    base, prefill, decode, _ = config.price
    return _priced(config, base, prefill, decode, 0)


def _no_step(config: SimulationConfig) -> SimulationConfig:
    _, prefill, decode, request = config.price
    return _priced(config, 0, prefill, decode, request)


def _no_context(config: SimulationConfig) -> SimulationConfig:
    base, prefill, decode, request = config.price
    flat = [
        (contexts, counts, [rows[0]] * len(rows)) for contexts, counts, rows in (prefill, decode)
    ]
    return _priced(config, base, *flat, request)


def _no_batch(config: SimulationConfig) -> SimulationConfig:
    base, prefill, (contexts, counts, rows), request = config.price
    alone = (contexts, counts, [[row[0]] * len(row) for row in rows])
    return _priced(config, base, prefill, alone, request)


def _no_copies(config: SimulationConfig) -> SimulationConfig:
    tiers = [
        replace(tier, read=replace(read, **FAST), store=replace(store, **FAST))
        for tier in config.tiers
        for read, store in [tier.lanes()]
    ]
    return replace(config, tiers=tuple(tiers), machines=())


def _engine(**settings: object) -> Callable[[SimulationConfig], SimulationConfig]:
    return lambda config: replace(config, manager=config.manager | settings)


TERMS: dict[str, Callable[[SimulationConfig], SimulationConfig]] = {
    "all": lambda config: config,
    "time of a request outside of steps": _no_request,
    "fixed time of a step": _no_step,
    "cost of context": _no_context,
    "cost of requests that decode together": _no_batch,
    "time of copies": _no_copies,
    "loads within the step that reads them": _engine(wait="all"),
    "chunks of a prefill": _engine(token_budget=2**20),
    "answers in the cache": _engine(answers="released"),
}
"""By term: the settings of a run without it."""


def errors(measured: Figures, predicted: Figures) -> dict[str, float]:
    """Return the relative error of each figure."""
    guessed = asdict(predicted)
    return {name: guessed[name] / value - 1 for name, value in asdict(measured).items()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what has goals: errors of median first-token times, and points of tokens found."""
    off = [abs(row["errors"]["median"]) for row in rows]
    high = [abs(row["errors"]["median"]) for row in rows if row["load"] > HIGH]
    return {
        "median": median(off),
        "worst": max(off),
        "high": median(high) if high else 0.0,
        "points": max(row["points"] for row in rows),
    }
