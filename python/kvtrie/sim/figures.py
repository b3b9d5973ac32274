"""Figures of a run, from sums over its requests.

Invariant: times are integers until their mean is computed, and quantiles are nearest-rank. Cost:
four integers per request, and a sort of each list at the end.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvtrie._kvtrie import Simulation
    from kvtrie.settings.tier import Tier
    from kvtrie.sim.config import SimulationConfig

__all__ = ["Counts", "figures_of"]

_QUANTILES = (("p50", 50), ("p90", 90), ("p99", 99))
_NS_PER_S = 1e9
_NS_PER_HOUR = 3.6e12
_GROWTH = 1.5
_SHARE = 50


def _times() -> array[int]:
    return array("Q")


@dataclass(slots=True)
class Counts:
    """Sums and times over the requests of a run, with times in arrival order.

    Attributes:
        requests: number of requests in the trace.
        refused: requests too large for the first tier.
        input_tokens: tokens of all prompts.
        output_tokens: answer tokens of all served requests.
        hit_tokens: found prompt tokens, by kind of tier, and "peer".
        saved_ns: computation time saved by them in ns, by the same names.
        computed_tokens: computed prompt tokens.
        queued_ns: total ns spent waiting for blocks.
        stalled_ns: total ns spent waiting for copies.
        suspended: number of suspensions of running requests.
        first_arrival: first arrival in ns.
        last_arrival: last arrival in ns.
        arrived: arrivals of served requests in ns. `first_arrival` and `last_arrival` include
            refused requests.
        ttft: ns from arrival to the first token, of served requests.
        whole: ns from arrival to the last token, of served requests.
        per_token: mean ns between tokens, of answers with at least two tokens.
        good: requests within the goals.
    """

    requests: int = 0
    refused: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict[str, int])
    saved_ns: dict[str, int] = field(default_factory=dict[str, int])
    computed_tokens: int = 0
    queued_ns: int = 0
    stalled_ns: int = 0
    suspended: int = 0
    first_arrival: int = 0
    last_arrival: int = 0
    good: int = 0
    arrived: array[int] = field(default_factory=_times)
    ttft: array[int] = field(default_factory=_times)
    whole: array[int] = field(default_factory=_times)
    per_token: array[int] = field(default_factory=_times)


def figures_of(config: SimulationConfig, simulation: Simulation, counts: Counts) -> dict[str, Any]:
    """Return the figures of a run. Times in ns have mean and nearest-rank quantiles, or are None.

    Tier hits are in blocks. A block from a peer is loaded from the host and counts there, but as
    `peer` in `hit_tokens` and `saved_ns`. `saved_ns` is the computation time saved by the found
    tokens. `blocks` of a tier are per machine, averaged if machines differ, or the total of a
    shared store.

    Args:
        config: settings, for goals and prices.
        simulation: machines after the run.
        counts: result of `play`.
    """
    return {
        "requests": counts.requests,
        "refused": counts.refused,
        "input_tokens": counts.input_tokens,
        "output_tokens": counts.output_tokens,
        "hit_tokens": counts.hit_tokens,
        "computed_tokens": counts.computed_tokens,
        "saved_ns": counts.saved_ns,
        "ttft_ns": _spread(counts.ttft),
        "tpot_ns": _spread(counts.per_token),
        "e2e_ns": _spread(counts.whole),
        "queue": counts.queued_ns / max(1, simulation.now - counts.first_arrival),
        "stalled_ns": counts.stalled_ns,
        "suspended": counts.suspended,
        "end_ns": simulation.now,
        **_load(config, counts, simulation.now),
        "tiers": _tiers(config, simulation, counts),
        "lanes": _lanes(config, simulation),
        "cost": _cost(config, counts, simulation.now),
    }


def _spread(times: array[int]) -> dict[str, float | int] | None:
    """Return the mean and nearest-rank quantiles."""
    if not times:
        return None
    ranked = np.sort(np.frombuffer(times, dtype=np.uint64))
    number = len(ranked)
    spread: dict[str, float | int] = {"mean": sum(times) / number}
    for name, share in _QUANTILES:
        spread[name] = int(ranked[-(-share * number // 100) - 1])
    return spread


def _load(config: SimulationConfig, counts: Counts, end: int) -> dict[str, Any]:
    """Return the goodput, and whether the run is saturated.

    A run is saturated if requests pile up: the number of requests without a first token at the last
    arrival is more than 1.5 times the number halfway to it, and at least 2 % of all requests.
    """
    arrived = np.frombuffer(counts.arrived, dtype=np.uint64)
    first = arrived + np.frombuffer(counts.ttft, dtype=np.uint64)

    def waiting(at: int) -> int:
        return int((arrived <= at).sum() - (first <= at).sum())

    begin, last = counts.first_arrival, counts.last_arrival
    half, at_end = waiting(begin + (last - begin) // 2), waiting(last)
    goodput = None
    if config.goals is not None:
        seconds = (end - begin) / _NS_PER_S
        goodput = {
            "requests": counts.good,
            "share": counts.good / max(1, counts.requests),
            "per_s": counts.good / seconds if seconds else 0.0,
        }
    return {
        "goodput": goodput,
        "waiting": {"half": half, "end": at_end},
        "saturated": at_end > _GROWTH * half and at_end * _SHARE >= counts.requests,
    }


def _tiers(
    config: SimulationConfig, simulation: Simulation, counts: Counts
) -> list[dict[str, Any]]:
    machines: int = config.manager.get("machines", 1)

    def each(tier: Tier, room: int) -> float:
        number = 1 if tier is config.shared else machines
        return room // number if room % number == 0 else room / number

    return [
        {
            "kind": tier.kind,
            "blocks": each(tier, room),
            "hits": hits,
            "hit_tokens": counts.hit_tokens.get(tier.kind, 0),
            "saved_ns": counts.saved_ns.get(tier.kind, 0),
            "clean": clean,
            "demoted": demoted,
            "dropped": dropped,
            "prefetched_byte_s": held,
        }
        for tier, room, (hits, _, clean, demoted, dropped), held in zip(
            config.tiers,
            config.rooms(),
            simulation.tiers(),
            simulation.prefetched_byte_s(),
            strict=True,
        )
    ]


def _lanes(config: SimulationConfig, simulation: Simulation) -> dict[str, dict[str, Any]]:
    """Return per lane: bytes, busy ns, busy share of the run, and total queueing ns.

    Managers count bytes of the model's KV. A tier's layout may have fewer.
    """
    machines: int = config.manager.get("machines", 1)
    number: Counter[str] = Counter()
    for one in config.machine_groups:
        for lane in (lane for tier in one.tiers for lane in tier.lanes()):
            number[lane.name] += one.count
    shares = {
        lane.name: 1.0
        if config.resume is not None
        else tier.room_bytes(config.model, config.block_tokens)
        / config.room(tier)
        / (config.model.layers * config.model.layer_bytes(config.block_tokens))
        for one in config.machine_groups
        for tier in one.tiers
        for lane in tier.lanes()
    }
    for lane in () if config.shared is None else config.shared.lanes():
        if lane.shares is not None:
            number[lane.name] = 1
    peers = config.manager.get("peers")
    if peers is not None:
        number[peers.name] = 1 if peers.shares is not None else machines * (machines - 1)
    return {
        name: {
            "bytes": round(carried * shares.get(name, 1)),
            "busy_ns": busy,
            "use": busy / max(1, simulation.now * (number[name] or machines)),
            "waited_ns": waited,
        }
        for name, (carried, busy, waited) in simulation.lanes().items()
    }


def _cost(config: SimulationConfig, counts: Counts, end: int) -> dict[str, float] | None:
    """Return money per hour, for the run, and per million served prompt and answer tokens."""
    hour = config.per_hour()
    if hour is None:
        return None
    run = hour * end / _NS_PER_HOUR
    tokens = sum(counts.hit_tokens.values()) + counts.computed_tokens + counts.output_tokens
    return {"per_hour": hour, "run": run, "per_million_tokens": run * 1e6 / max(1, tokens)}
