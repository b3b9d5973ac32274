"""Decisions: the choices of a run's router, as lines.

Invariant: figures are by exact knowledge, whatever the router went by. Cost: one dict per decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["by_name"]

_Choice: TypeAlias = "tuple[int, int, int, int]"

_Decision: TypeAlias = "tuple[int, int, _Choice, list[_Choice], int]"
"""Request, arrival in ns, machine chosen, others, regret in ns; `Simulation.run` says more."""

_CHOICE = ("machine", "hit_tokens", "queued_tokens", "cost_ns")


def by_name(
    on_decision: Callable[[dict[str, Any]], object] | None,
) -> Callable[[_Decision], object] | None:
    """Return a callback for `Simulation.run` that passes on each decision as a line.

    A line has `id`, `arrival_ns`, what is known of the machine chosen, `best` and `regret_ns`. Of a
    machine that is `machine`, `hit_tokens`, `queued_tokens` and `cost_ns`: the estimated time to
    the first token, which is to compute the missing tokens of the requests in its queue and then
    those of this prompt. `best` are others, the cheapest first.
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
