"""Decisions of a run's router, as lines.

Invariant: figures come from exact lookups, whatever the router used. Cost: a dict per decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["by_name"]

_Choice: TypeAlias = "tuple[int, int, int, int]"

_Decision: TypeAlias = "tuple[int, int, _Choice, list[_Choice], int]"
"""Request, arrival in ns, chosen machine, alternatives, regret in ns: see `Simulation.run`."""

_CHOICE = ("machine", "hit_tokens", "queued_tokens", "cost_ns")


def by_name(
    on_decision: Callable[[dict[str, Any]], object] | None,
) -> Callable[[_Decision], object] | None:
    """Return a callback for `Simulation.run` to report each decision as a line.

    A line has `id`, `arrival_ns`, the figures of the chosen machine, `best` and `regret_ns`. The
    figures of a machine are `machine`, `hit_tokens`, `queued_tokens` and `cost_ns`: the estimated
    time to the first token, to compute the missing tokens of its queued requests and then of this
    prompt. `best` are the alternatives, cheapest first.
    """
    if on_decision is None:
        return None

    def decide(decision: _Decision) -> None:
        number, arrival, chosen, others, regret = decision
        on_decision(
            {
                "id": number,
                "arrival_ns": arrival,
                **dict(zip(_CHOICE, chosen, strict=True)),
                "best": [dict(zip(_CHOICE, other, strict=True)) for other in others],
                "regret_ns": regret,
            }
        )

    return decide
