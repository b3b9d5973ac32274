"""Calibration: fits the settings of a simulation to the times of a real run.

Fits the logarithms of positive settings by least squares of the relative errors of the times to the
first and last token (Levenberg-Marquardt with finite differences). Every second request is left out
of the fit, and the error over these requests shows how reliable the settings are.
Invariant: simulated and measured requests are paired by trace order. Cost: a run per setting and
round, for a few rounds.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import real, shown, whole
from kvtrie.sim.readers.lines import checked, lines_of, row_of
from kvtrie.sim.run import run_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.grid import Cell

__all__ = ["Fit", "calibrate", "read_seen", "start_of"]

_PART = 2**32
_STEP = 1e-3
_ROUNDS = 30
_SETTLED = 1e-9
_MOST_DAMPING = 1e9
_LATEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of a fit.

    Attributes:
        values: fitted settings by key.
        before: mean absolute relative error in percent of `ttft` and `e2e` over the requests left
            out, with the starting values.
        after: the same errors with `values`.
        fitted: number of fitted requests.
        left_out: number of requests left out of the fit.
    """

    values: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    fitted: int
    left_out: int


def read_seen(path: Path) -> NDArray[np.float64]:
    """Return the measured times of requests, in trace order.

    Args:
        path: JSON lines with `arrival_ns`, `first_token_ns` and `end_ns`, as written by `run
            --requests`. The last two are None for a refused request.

    Returns:
        float64 `(requests, 2)`, ns from arrival to first and last token. NaN for refused requests.

    Raises:
        ConfigError: an invalid line.
    """
    times = list(checked(path, lines_of(path), _seen, None))
    return np.array(times, dtype=np.float64).reshape(-1, 2)


def _seen(line: str) -> tuple[float, float]:
    row = row_of(line)
    at = whole("arrival_ns", row.get("arrival_ns"), 0, _LATEST)
    if row.get("first_token_ns") is None:
        return np.nan, np.nan
    first = whole("first_token_ns", row.get("first_token_ns"), at, _LATEST)
    return first - at, whole("end_ns", row.get("end_ns"), first, _LATEST) - at


def start_of(config: SimulationConfig) -> dict[str, float]:
    """Return the keys fitted by default, with their starting values.

    An affine cost per token, and bandwidth and latency of each tier lane used by a run, as far as
    positive.

    Raises:
        ConfigError: machines with different hardware, whose keys have no default.
    """
    if config.machines:
        raise ConfigError(
            f"machines are {len(config.machines)} of different hardware: name the keys with --fit"
        )
    start: dict[str, float] = {}
    if isinstance(config.price, tuple) and len(config.price) == 2:  # noqa: PLR2004 - affine
        base, slope = config.price
        start["cost.ns_per_token"] = base / _PART
        start["cost.alpha"] = slope / base if base else 0.0
    lanes = run_config(config)["lanes"]
    for at, tier in enumerate(config.tiers):
        for way, lane in zip(("read", "store"), tier.lanes(), strict=True):
            if lanes[lane.name]["bytes"]:
                start[f"tiers.{at}.{way}.bytes_per_s"] = lane.bytes_per_s
                start[f"tiers.{at}.{way}.latency_ns"] = lane.latency_ns
    return {key: value for key, value in start.items() if value}


def calibrate(
    make: Callable[[dict[str, Any]], Cell],
    start: dict[str, float],
    seen: NDArray[np.float64],
    on_run: Callable[[], object] = lambda: None,
) -> Fit:
    """Fit settings to measured times.

    Args:
        make: creates a config from settings, see `kvtrie.sim.grid.variation`.
        start: positive starting value of each key.
        seen: result of `read_seen`, with a row per request of the trace.
        on_run: called after each run.

    Raises:
        ConfigError: invalid settings, or a wrong number of requests.
    """
    names = list(start)
    for name, value in start.items():
        if not real(name, value, 0, math.inf):
            raise ConfigError(f"{name} is {shown(value)}: only positive settings can be fitted")

    def settings(at: NDArray[np.float64]) -> dict[str, float]:
        values = np.exp(at).tolist()
        return {
            name: round(value) if name.endswith("_ns") else value
            for name, value in zip(names, values, strict=True)
        }

    def errors(at: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return relative errors `(requests, 2)`, 0 for requests refused in either run."""
        times = _times(make(settings(at)).config)
        on_run()
        if times.shape != seen.shape:
            raise ConfigError(f"{len(seen)} requests were seen, but the trace has {len(times)}")
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = (times - seen) / seen
        return np.where(np.isfinite(relative), relative, 0.0)

    usable = np.isfinite(seen[:, 0]) & (seen[:, 0] > 0)
    odd = np.arange(len(seen)) % 2 == 1
    fitted, left_out = usable & ~odd, usable & odd
    if not (fitted.any() and left_out.any()):
        raise ConfigError(f"{int(usable.sum())} requests have times, at least two wanted")
    begin = np.log(np.array([float(start[name]) for name in names]))
    with ThreadPoolExecutor(os.cpu_count(), "kvtrie-sim") as threads:

        def residuals(places: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
            return list(threads.map(errors, places))

        at, last = _least_squares(begin, residuals, fitted)
        first = errors(begin)
    return Fit(
        values=settings(at),
        before=_percent(first[left_out]),
        after=_percent(last[left_out]),
        fitted=int(fitted.sum()),
        left_out=int(left_out.sum()),
    )


def _times(config: SimulationConfig) -> NDArray[np.float64]:
    times: list[tuple[float, float]] = []

    def on_request(line: dict[str, Any]) -> None:
        at, first = line["arrival_ns"], line["first_token_ns"]
        refused = first is None
        times.append((np.nan, np.nan) if refused else (first - at, line["end_ns"] - at))

    run_config(config, on_request)
    return np.array(times, dtype=np.float64).reshape(-1, 2)


def _percent(errors: NDArray[np.float64]) -> dict[str, float]:
    ttft, whole = (100 * np.abs(errors).mean(axis=0)).tolist()
    return {"ttft": ttft, "e2e": whole}


def _least_squares(
    begin: NDArray[np.float64],
    residuals: Callable[[Sequence[NDArray[np.float64]]], list[NDArray[np.float64]]],
    fitted: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the point with the least sum of squares, and all residuals there."""
    at, damping = begin, 1e-2
    (errors,) = residuals([at])
    loss = float((errors[fitted] ** 2).sum())
    for _ in range(_ROUNDS):
        steps = np.eye(len(at)) * _STEP
        moved = residuals([at + step for step in steps])
        slopes = np.stack([(one - errors)[fitted].ravel() / _STEP for one in moved], axis=1)
        normal, pull = slopes.T @ slopes, slopes.T @ errors[fitted].ravel()
        before = loss
        while damping < _MOST_DAMPING:
            # A setting without an effect keeps its value.
            scale = np.diag(np.maximum(np.diag(normal), 1e-12))
            move = np.linalg.lstsq(normal + damping * scale, -pull, rcond=None)[0]
            place = at + np.clip(move, -1.0, 1.0)
            (found_residuals,) = residuals([place])
            found = float((found_residuals[fitted] ** 2).sum())
            if found < loss:
                at, errors, loss, damping = place, found_residuals, found, damping / 10
                break
            damping *= 4
        if before - loss <= _SETTLED * before:
            break
    return at, errors
