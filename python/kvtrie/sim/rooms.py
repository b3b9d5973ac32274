"""Policies over rooms: cost saved and blocks found of each, and of a plan that knows the future.

One tier and leaf-only, where the plan is the rule "the last block whose next use is farthest": a
reference, not a bound, where costs count. Cost: a replay per policy and room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtrie.settings.tier import Tier
from kvtrie.sim.offline import leaves_first
from kvtrie.sim.replay import open_manager, prompt_cost, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtrie.sim.trace import TraceRequest

__all__ = ["FUTURE", "RoomFigures", "over_rooms", "usual_rooms"]

FUTURE = "belady, leaves"
_SHARES = (0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True, slots=True)
class RoomFigures:
    """Figures of a policy in a room.

    Attributes:
        policy: its name, or `FUTURE`.
        room: blocks.
        cost_saved: cost saved per cost of computing everything, from 0 to 1.
        hits: blocks found per block asked for, from 0 to 1.
    """

    policy: str
    room: int
    cost_saved: float
    hits: float


def usual_rooms(requests: Sequence[TraceRequest]) -> list[int]:
    """1, 3, 10 and 30 % of the distinct blocks, at least the longest prompt."""
    distinct = len({block for request in requests for block in request.blocks.tolist()})
    longest = max(len(request.blocks) for request in requests)
    return sorted({max(longest, round(share * distinct)) for share in _SHARES})


def over_rooms(
    requests: Sequence[TraceRequest],
    policies: Iterable[str],
    rooms: Sequence[int],
    *,
    block_tokens: int = 512,
    ends: bool = False,
    objective: Literal["cost", "balanced", "hits"] = "cost",
    watch: Callable[[Sequence[tuple[str, int]]], Iterable[tuple[str, int]]] = iter,
) -> list[RoomFigures]:
    """Play a trace under each policy in each room, policy by policy; `FUTURE` is last.

    Args:
        requests: in order of arrival.
        policies: names.
        rooms: blocks of the only tier.
        block_tokens: tokens of a block.
        ends: as for `replay`.
        objective: what policies by value save; others do not ask.
        watch: gives the pairs of policy and room on as they are played.

    Raises:
        ConfigError: an unknown policy, or one without values for another objective than cost.

    A prompt that is longer than a room is refused there, and finds nothing.
    """
    found: list[RoomFigures] = []
    for policy, room in watch([(policy, room) for policy in (*policies, FUTURE) for room in rooms]):
        if policy == FUTURE:
            found.append(_future(requests, room, block_tokens))
            continue
        tiers = [Tier("gpu", blocks=room)]
        # `lru` is shown for comparison and has no values for other objectives.
        named = objective if policy != "lru" else "cost"
        manager = open_manager(tiers, policy=policy, block_tokens=block_tokens, objective=named)
        played = replay(requests, manager, block_tokens=block_tokens, ends=ends)
        found.append(RoomFigures(policy, room, played.cost_rate, played.hit_rate))
    return found


def _future(requests: Sequence[TraceRequest], room: int, block_tokens: int) -> RoomFigures:
    plan = leaves_first([one for one in requests if len(one.blocks) <= room], room)
    blocks = sum(len(request.blocks) for request in requests)
    saved = sum(prompt_cost(len(hits), block_tokens) for hits in plan.blocks)
    cost = sum(prompt_cost(len(request.blocks), block_tokens) for request in requests)
    return RoomFigures(FUTURE, room, saved / cost, plan.hits / blocks)
