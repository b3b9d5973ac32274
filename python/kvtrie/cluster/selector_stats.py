"""SelectorStats: the counters of a selector. Cost: none."""

from __future__ import annotations

from dataclasses import dataclass

from kvtrie.breaker import State  # noqa: TC001 - of a public dataclass

__all__ = ["SelectorStats"]


@dataclass(frozen=True, slots=True)
class SelectorStats:
    """Counters of a selector since it was made.

    Attributes:
        picks: requests by the choice of their machine: "selected" by the service, "probe", or by
            the selector's own counts because the answer of the service was "late", "unreachable",
            "invalid", "refused" or not requested ("open").
        unknown: calls of `prefilled` and `done` for a request not in flight.
        forgotten: requests counted as ended because more than 65 536 were in flight.
        unreleased: ends not reported to the service because more than 8192 ends were waiting. The
            service counts these requests until it restarts.
        requests: requests in flight by machine.
        calls: calls of the service by outcome, as `ServiceStats.calls`.
        breaker: state of the circuit breaker of all calls.
    """

    picks: dict[str, int]
    unknown: int
    forgotten: int
    unreleased: int
    requests: dict[int, int]
    calls: dict[str, int]
    breaker: State
