"""Run: a simulation from its settings to its figures.

Invariant: equal settings and traces give equal figures. The wall clock is only read around the run.
Cost: the managers' calls, and the data kept by `figures` for each request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie._kvtrie import Simulation
from kvtrie.errors import ConfigError
from kvtrie.sim.config.goals import Goals
from kvtrie.sim.decisions import by_name
from kvtrie.sim.figures import Counts, figures_of
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.sessions import with_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.readers.rows import AnyRow, Record

__all__ = ["open_simulation", "play", "run_config"]

_KINDS = ("gpu", "host", "disk")


def open_simulation(config: SimulationConfig, *, logged: bool = False) -> Simulation:
    """Return the machines of a run, checked and empty.

    Args:
        config: settings of the run.
        logged: log all manager calls.

    Raises:
        ConfigError: contradictory settings.
    """
    weight = config.block_tokens if config.trace.hashed else 1
    more = dict(config.manager)
    if config.machines:
        more["machines"] = [
            (one.tiers, one.price, one.cost) for one in config.machines for _ in range(one.count)
        ]
    reports = config.trace.reports
    if reports.number:
        kinds = [tier.kind for tier in config.tiers]
        if reports.tier not in kinds:
            raise ConfigError(
                f"trace.reports.tier is {reports.tier!r}, one of {', '.join(kinds)} wanted"
            )
        more["reports"] = (reports.hint, kinds.index(reports.tier), reports.demote)
    return Simulation(
        config.model,
        config.tiers,
        price=config.price,
        cost=config.cost,  # pyright: ignore[reportArgumentType]
        block_tokens=config.block_tokens // weight,
        token_weight=weight,
        logged=logged,
        **more,
    )


def run_config(
    config: SimulationConfig,
    on_request: Callable[[dict[str, Any]], object] | None = None,
    *,
    watch: Callable[[Iterable[AnyRow]], Iterable[AnyRow]] = iter,
    simulation: Simulation | None = None,
    on_decision: Callable[[dict[str, Any]], object] | None = None,
    best: int = 0,
) -> dict[str, Any]:
    """Play the trace of a config.

    Args:
        config: settings of the run.
        on_request: called with the line of each request, in arrival order.
        watch: passes on the requests as they are read.
        simulation: machines of `open_simulation`. None creates them.
        on_decision: called with a line of `sim.decisions` for each router decision.
        best: number of alternatives reported in each decision, best first.

    Returns:
        The figures of `figures_of`, equal for equal runs.

    Raises:
        ConfigError: invalid settings, or an invalid line of the trace.
    """
    simulation = simulation or open_simulation(config)
    skipped = Skipped() if config.trace.lenient else None

    def rows(skipped: Skipped | None) -> Iterable[AnyRow]:
        read = trace_requests(config.trace, config.block_tokens, skipped, config.most_blocks)
        return _full_blocks(config, read)

    requests: Iterable[AnyRow]
    requests = watched = watch(rows(skipped))
    trace = config.trace
    if trace.ends or trace.reports.number or trace.tenants.number:
        once = rows(skipped and Skipped())
        requests = with_sessions(
            watched,
            once,
            ends=trace.ends,
            reports=trace.reports,
            tenants=trace.tenants,
            seed=trace.seed,
        )
    counts = play(config, simulation, requests, on_request, on_decision=on_decision, best=best)
    figures = figures_of(config, simulation, counts)
    if skipped is not None:
        figures["skipped_lines"] = skipped.lines
        figures["kept_lines"] = skipped.parsed
    return figures


def _full_blocks(config: SimulationConfig, requests: Iterable[AnyRow]) -> Iterable[AnyRow]:
    """Leave out a partial last block of hashed prompts with separate layer groups.

    No resume point is after it.
    """
    if config.resume is None or not config.trace.hashed:
        yield from requests
        return
    for row in requests:
        full = row[1][: max(1, row[2] // config.block_tokens)]
        yield (row[0], full, *row[2:])  # pyright: ignore[reportReturnType] - the same length


def play(
    config: SimulationConfig,
    simulation: Simulation,
    requests: Iterable[AnyRow],
    on_request: Callable[[dict[str, Any]], object] | None = None,
    *,
    on_decision: Callable[[dict[str, Any]], object] | None = None,
    best: int = 0,
) -> Counts:
    """Play requests through a simulation and count their hits, tokens and times.

    Args:
        config: settings, for tiers and goals.
        simulation: machines of `open_simulation`.
        requests: requests in arrival order.
        on_request: called with the line of each request, in arrival order, with times in ns.
        on_decision: called with a line of `sim.decisions` for each router decision.
        best: number of alternatives reported in each decision, best first.

    Raises:
        ConfigError: a request arriving before the request above it.
    """
    kinds = [*(tier.kind for tier in config.tiers), "peer"]
    none = {**dict.fromkeys((*_KINDS, *kinds), 0), "peer": 0}
    counts = Counts()
    # By tier, and last for peers.
    found, spared = [0] * len(kinds), [0] * len(kinds)
    goals = config.goals or Goals()

    def counted() -> Iterable[AnyRow]:
        for request in requests:
            counts.input_tokens += request[2]
            yield request

    def on_record(record: Record) -> None:
        _, _, arrival, first, end, hits, peer, (computed, _, _) = record[:8]
        (queued, stalled), saved, suspended, answer = record[8:]
        if not counts.requests:
            counts.first_arrival = arrival
        counts.last_arrival = arrival
        counts.requests += 1
        if first is None or end is None:
            counts.refused += 1
        else:
            counts.output_tokens += answer
            counts.computed_tokens += computed
            counts.queued_ns += queued
            counts.stalled_ns += stalled
            counts.suspended += suspended
            for at, tokens in enumerate(hits):
                found[at] += tokens
            found[-1] += peer
            for at, ns in enumerate(saved):
                spared[at] += ns
            counts.arrived.append(arrival)
            counts.ttft.append(first - arrival)
            counts.whole.append(end - arrival)
            per_token = (end - first) // max(1, answer - 1)
            if answer > 1:
                counts.per_token.append(per_token)
            counts.good += first - arrival <= goals.ttft_ns and per_token <= goals.tpot_ns
        if on_request is not None:
            on_request(
                _line(record, {**none, **dict(zip(kinds, hits, strict=False)), "peer": peer})
            )

    simulation.run(counted(), on_record, by_name(on_decision), best=best)
    counts.hit_tokens = {**none, **dict(zip(kinds, found, strict=True))}
    counts.saved_ns = {**none, **dict(zip(kinds, spared, strict=True))}
    return counts


def _line(record: Record, hits: dict[str, int]) -> dict[str, Any]:
    """Return the line of a request: its times in ns and the tokens found by tier."""
    number, machine, arrival, first, end, _, _, (computed, _, _) = record[:8]
    return {
        "id": number,
        "machine": machine,
        "arrival_ns": arrival,
        "first_token_ns": first,
        "end_ns": end,
        "hit_tokens": hits,
        "computed_tokens": computed,
    }
