"""Comparison of policies over rooms: cost saved and blocks found, including an offline plan.

A single leaf-only tier. The plan evicts the last block with the farthest next use: a reference, not
a bound, if costs count. Cost: a replay per policy and room.
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
        policy: name of the policy, or `FUTURE`.
        room: number of blocks.
        cost_saved: saved share of the total cost, from 0 to 1.
        hits: found share of the requested blocks, from 0 to 1.
    """

    policy: str
    room: int
    cost_saved: float
    hits: float


def usual_rooms(requests: Sequence[TraceRequest]) -> list[int]:
    """Return 1, 3, 10 and 30 % of the distinct blocks, at least the longest prompt."""
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
    """Play a trace under each policy in each room, policy by policy. `FUTURE` is last.

    Args:
        requests: requests in arrival order.
        policies: names of the policies.
        rooms: blocks of the only tier.
        block_tokens: tokens per block.
        ends: as for `replay`.
        objective: objective of value-based policies, ignored by the rest.
        watch: passes on the pairs of policy and room as they are played.

    Raises:
        ConfigError: an unknown policy, or a policy without values with an objective other than
            cost.

    A prompt longer than a room is refused there, without hits.
    """
    found: list[RoomFigures] = []
    for policy, room in watch([(policy, room) for policy in (*policies, FUTURE) for room in rooms]):
        if policy == FUTURE:
            found.append(_future(requests, room, block_tokens))
            continue
        tiers = [Tier("gpu", blocks=room)]
        # `lru` is included for comparison, and has no values for further objectives.
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
