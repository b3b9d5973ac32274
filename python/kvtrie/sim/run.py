"""Run: a simulation from its settings to its figures.

Invariant: equal settings and traces give equal figures; the wall clock is read only around the run.
Cost: that of the managers' calls, and three integers kept per request for the quantiles.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvtrie._kvtrie import Simulation
from kvtrie.sim.requests import trace_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.requests import Asked

__all__ = ["figures_of", "open_simulation", "play", "run_config"]

_Record: TypeAlias = "tuple[int, int, int, int | None, int | None, list[int], int, int, int]"

_KINDS = ("gpu", "host", "disk")
_QUANTILES = (("p50", 50), ("p90", 90), ("p99", 99))


def open_simulation(config: SimulationConfig, *, logged: bool = False) -> Simulation:
    """The machines of a run, checked and without a block.

    Args:
        config: the settings.
        logged: keep all calls of managers.

    Raises:
        ConfigError: settings that contradict each other.
    """
    weight = config.block_tokens if config.trace.format == "mooncake" else 1
    return Simulation(
        config.model,
        config.tiers,
        price=config.price,
        cost=config.cost,  # pyright: ignore[reportArgumentType]
        block_tokens=config.block_tokens // weight,
        token_weight=weight,
        logged=logged,
        **config.manager,
    )


def run_config(
    config: SimulationConfig, told: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    """Play the trace of a config.

    Args:
        config: the settings.
        told: called with each request's line, in the order of the trace.

    Returns:
        The figures of `figures_of`, and the seconds that the run took as `wall_s`.

    Raises:
        ConfigError: settings or a line of the trace that cannot be.
    """
    simulation = open_simulation(config)
    begun = time.perf_counter()
    counts = play(config, simulation, trace_requests(config.trace, config.block_tokens), told)
    figures = figures_of(config, simulation, counts)
    return {**figures, "wall_s": time.perf_counter() - begun}


@dataclass(slots=True)
class _Counts:
    """What is added up over the requests of a run."""

    requests: int
    refused: int
    input_tokens: int
    output_tokens: int
    hit_tokens: dict[str, int]
    computed_tokens: int
    stalled_ns: int
    ttft: array[int]
    whole: array[int]
    per_token: array[int]


def play(
    config: SimulationConfig,
    simulation: Simulation,
    requests: Iterable[Asked],
    told: Callable[[dict[str, Any]], object] | None = None,
) -> _Counts:
    """Play requests through a simulation and count what became of them."""
    kinds = [tier.kind for tier in config.tiers]
    none = {**dict.fromkeys((*_KINDS, *kinds), 0), "peer": 0}
    counts = _Counts(0, 0, 0, 0, dict(none), 0, 0, array("Q"), array("Q"), array("Q"))
    answers: dict[int, int] = {}

    def asked() -> Iterable[Asked]:
        for number, request in enumerate(requests):
            answers[number] = request[3]
            counts.input_tokens += request[2]
            yield request

    def tell(record: _Record) -> None:
        number, machine, arrival, first, end, hits, peer, computed, stalled = record
        answer = answers.pop(number)
        found = {**none, **dict(zip(kinds, hits, strict=False)), "peer": peer}
        counts.requests += 1
        if first is None or end is None:
            counts.refused += 1
        else:
            counts.output_tokens += answer
            counts.computed_tokens += computed
            counts.stalled_ns += stalled
            for kind, tokens in found.items():
                counts.hit_tokens[kind] += tokens
            counts.ttft.append(first - arrival)
            counts.whole.append(end - arrival)
            if answer > 1:
                counts.per_token.append((end - first) // (answer - 1))
        if told is not None:
            told(
                {
                    "id": number,
                    "machine": machine,
                    "arrival_ns": arrival,
                    "first_token_ns": first,
                    "end_ns": end,
                    "hit_tokens": found,
                    "computed_tokens": computed,
                }
            )

    simulation.run(asked(), tell)
    return counts


def figures_of(config: SimulationConfig, simulation: Simulation, counts: _Counts) -> dict[str, Any]:
    """The figures of a run: times in ns with mean and nearest-rank quantiles, None without any.

    Hits of tiers are in blocks; a block that came from a peer was loaded from the host and counts
    there, in `hit_tokens` as `peer`.
    """
    tiers = [
        {
            "kind": tier.kind,
            "blocks": tier.room(config.model, config.block_tokens),
            "hits": hits,
            "clean": clean,
            "demoted": demoted,
            "dropped": dropped,
        }
        for tier, (hits, _, clean, demoted, dropped) in zip(
            config.tiers, simulation.tiers(), strict=True
        )
    ]
    lanes = {
        name: {"bytes": carried, "busy_ns": busy}
        for name, (carried, busy) in simulation.lanes().items()
    }
    return {
        "requests": counts.requests,
        "refused": counts.refused,
        "input_tokens": counts.input_tokens,
        "output_tokens": counts.output_tokens,
        "hit_tokens": counts.hit_tokens,
        "computed_tokens": counts.computed_tokens,
        "ttft_ns": _spread(counts.ttft),
        "tpot_ns": _spread(counts.per_token),
        "e2e_ns": _spread(counts.whole),
        "stalled_ns": counts.stalled_ns,
        "end_ns": simulation.now,
        "tiers": tiers,
        "lanes": lanes,
    }


def _spread(times: array[int]) -> dict[str, float | int] | None:
    """Mean and nearest-rank quantiles."""
    if not times:
        return None
    ranked = sorted(times)
    number = len(ranked)
    spread: dict[str, float | int] = {"mean": sum(ranked) / number}
    for name, share in _QUANTILES:
        spread[name] = ranked[-(-share * number // 100) - 1]
    return spread
