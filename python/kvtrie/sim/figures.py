"""Figures: what a run comes to, from what is added up over its requests.

Invariant: times are integers until their mean is taken; quantiles are nearest-rank. Cost: four
integers per request, and one sort of each at the end.
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
    """Sums and times over the requests of a run; times in the order of arrival.

    Attributes:
        requests: requests of the trace.
        refused: requests that did not fit on the first tier.
        input_tokens: tokens of all prompts.
        output_tokens: tokens of the answers of the requests that were served.
        hit_tokens: tokens of prompts found, by kind of tier, and from a "peer".
        saved_ns: nanoseconds that computing them would have taken, by the same names.
        computed_tokens: tokens of prompts that were computed.
        queued_ns: nanoseconds that requests waited for their blocks, in all.
        stalled_ns: nanoseconds that requests waited for copies, in all.
        suspended: number of times that a running request was suspended.
        first_arrival: the first arrival, in ns.
        last_arrival: the last arrival, in ns.
        arrived: arrivals of the requests that were served, in ns; with `first_arrival` and
            `last_arrival` those of all.
        ttft: from arrival to the first token, in ns, of the same requests.
        whole: from arrival to the last token, in ns, of the same requests.
        per_token: mean ns from token to token, of answers of two tokens and more.
        good: requests that met the goals.
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
    """Return the figures of a run: times in ns with mean and nearest-rank quantiles, or None.

    Hits of tiers are in blocks; a block that came from a peer was loaded from the host and counts
    there, in `hit_tokens` and `saved_ns` as `peer`. `saved_ns` is how long computing the tokens
    that were found would have taken. `blocks` of a tier are those of one machine, in the mean where
    machines differ; of a store of all machines they are all that it has.

    Args:
        config: the settings, for goals and prices.
        simulation: the machines after the run.
        counts: what `play` counted.
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
    """Mean and nearest-rank quantiles."""
    if not times:
        return None
    ranked = np.sort(np.frombuffer(times, dtype=np.uint64))
    number = len(ranked)
    spread: dict[str, float | int] = {"mean": sum(times) / number}
    for name, share in _QUANTILES:
        spread[name] = int(ranked[-(-share * number // 100) - 1])
    return spread


def _load(config: SimulationConfig, counts: Counts, end: int) -> dict[str, Any]:
    """Goodput, and whether more comes in than is served.

    A run is saturated if requests pile up: those without a first token are, at the last arrival,
    more than half as many again as half way to it, and at least one in fifty of all.
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
    """Per lane: bytes, busy ns, the share of the run that is, and ns waited for it, in all.

    Managers count in bytes of the model's KV; a tier's own layout may have fewer.
    """
    machines: int = config.manager.get("machines", 1)
    number: Counter[str] = Counter()
    for one in config.alike:
        for lane in (lane for tier in one.tiers for lane in tier.lanes()):
            number[lane.name] += one.count
    shares = {
        lane.name: 1.0
        if config.resume is not None
        else tier.room_bytes(config.model, config.block_tokens)
        / config.room(tier)
        / (config.model.layers * config.model.layer_bytes(config.block_tokens))
        for one in config.alike
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
    """Money per hour, for the run, and per million tokens of served prompts and answers."""
    hour = config.per_hour()
    if hour is None:
        return None
    run = hour * end / _NS_PER_HOUR
    tokens = sum(counts.hit_tokens.values()) + counts.computed_tokens + counts.output_tokens
    return {"per_hour": hour, "run": run, "per_million_tokens": run * 1e6 / max(1, tokens)}
