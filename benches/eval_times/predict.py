"""The simulator's account of a run, from the trace, the sizes and the profile.

Invariant: no figure of a measured run goes in. Cost: a second per run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benches.eval_times.server import BLOCK, BUDGET, RUNNING
from kvtrie.sim.config import config_of
from kvtrie.sim.run import run_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie.sim.config import SimulationConfig

__all__ = ["Figures", "Predicted", "figures_of", "predicted", "rate"]

TIERS = ("gpu", "host", "disk")

Requests: TypeAlias = "Sequence[tuple[float, float, float, int]]"
"""Of each request: when it came in, its first and its last token, and the number of its tokens."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of a run, over its requests.

    Attributes:
        median: of times to the first token.
        mean: of the same.
        p90: of the same.
        token: mean time from token to token.
        whole: mean time to the last token.
    """

    median: float
    mean: float
    p90: float
    token: float
    whole: float


def figures_of(requests: Requests) -> Figures:
    """Return the figures of requests."""
    at, first, last, tokens = np.array(requests).T
    waits, several = first - at, tokens > 1
    return Figures(
        float(np.median(waits)),
        float(waits.mean()),
        float(np.quantile(waits, 0.9)),
        float(((last - first)[several] / (tokens[several] - 1)).mean()),
        float((last - at).mean()),
    )


@dataclass(frozen=True, slots=True)
class Predicted:
    """A simulated run.

    Attributes:
        requests: its requests, in the order of the trace.
        found: tokens found, by tier.
        queue: mean number of requests that waited.
    """

    requests: Requests
    found: dict[str, int]
    queue: float


def predicted(
    trace: Path,
    model: Path,
    tiers: list[dict[str, Any]],
    profile: Path,
    change: Callable[[SimulationConfig], SimulationConfig] = lambda config: config,
) -> Predicted:
    """Return what the simulator says of a run.

    Args:
        trace: of tokens.
        model: its folder.
        tiers: the engine's own cache and those below it, with blocks.
        profile: of `kvtrie profile --server`.
        change: leaves a term of the engine's model out.
    """
    shape = json.loads((model / "config.json").read_text())
    document: dict[str, Any] = {
        "trace": {"path": str(trace), "format": "tokens"},
        "model": {
            "layers": shape["num_hidden_layers"],
            "kv_heads": shape["num_key_value_heads"],
            "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
            "dtype": "bfloat16",
        },
        "manager": {"block_tokens": BLOCK},
        "engine": {
            "kind": "continuous",
            "wait": "step",
            "token_budget": BUDGET,
            "max_running": RUNNING,
            "answers": "cached",
        },
        "cost": {"kind": "profile", "path": str(profile)},
        "lanes": {"path": str(profile)},
        "tiers": tiers,
    }
    answers = [json.loads(line)["output_tokens"] for line in trace.read_text().splitlines()]
    lines: list[dict[str, Any]] = []
    run = run_config(change(config_of(document, Path())), lines.append)
    requests = [
        (line["arrival_ns"] / 1e9, line["first_token_ns"] / 1e9, line["end_ns"] / 1e9, answer)
        for line, answer in zip(lines, answers, strict=True)
    ]
    found = {tier: run["hit_tokens"][tier] for tier in TIERS}
    return Predicted(requests, found, run["queue"])


def rate(played: Predicted) -> float:
    """Return the requests per second of a run in which all came at once."""
    return len(played.requests) / max(last for _, _, last, _ in played.requests)
