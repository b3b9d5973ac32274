"""`kvtrie replay --policy A,B,C`: policies over rooms, as a table and a picture."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from kvtrie.cli.progress import watched
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from kvtrie.sim.rooms import RoomFigures
    from kvtrie.sim.trace import TraceRequest

__all__ = ["compare"]


def compare(
    given: argparse.Namespace, requests: list[TraceRequest], settings: dict[str, Any]
) -> None:
    """Play the policies and print their savings, with `lru` and an offline plan as baselines.

    Raises:
        ConfigError: an argument unsuitable for several policies, or as `over_rooms`.
    """
    from kvtrie.sim.rooms import over_rooms, usual_rooms

    _check(given)
    policies = list(dict.fromkeys([*given.policy.split(","), "lru"]))
    rooms = given.rooms or usual_rooms(requests)
    found = over_rooms(
        requests,
        policies,
        rooms,
        block_tokens=given.block_tokens,
        ends=given.ends,
        objective=given.objective,
        watch=lambda pairs: watched(pairs, "Replaying", quiet=given.json),
    )
    if given.plot is not None:
        from kvtrie.sim.pictures import draw_savings

        lines: dict[str, list[tuple[float, float]]] = {}
        for one in found:
            lines.setdefault(one.policy, []).append((one.room, one.cost_saved))
        draw_savings(given.plot, given.trace.name, lines)
    if given.json:
        rows = [dataclasses.asdict(one) for one in found]
        sys.stdout.write(json.dumps({**settings, "rows": rows}) + "\n")
    else:
        sys.stdout.write(_text(given.trace.name, found))


def _check(given: argparse.Namespace) -> None:
    for name in ("save", "evictions", "tier", "model", "points"):
        if getattr(given, name):
            raise ConfigError(f"--{name} goes with one policy, not with {given.policy}")
    if (given.structure, given.load) != ("leaf-only", "all"):
        raise ConfigError("several policies are compared leaf-only and with --load all")


def _text(name: str, found: list[RoomFigures]) -> str:
    """Return a row per policy and a column per room."""
    rooms = sorted({one.room for one in found})
    text = f"{name}: cost saved / blocks found, per cent\n\n"
    text += f"{'policy':16}" + "".join(f"{f'{room} blocks':>18}" for room in rooms) + "\n"
    for policy in dict.fromkeys(one.policy for one in found):
        cells = {one.room: one for one in found if one.policy == policy}
        pairs = (f"{100 * cells[r].cost_saved:.1f} / {100 * cells[r].hits:.1f}" for r in rooms)
        text += f"{policy:16}" + "".join(f"{pair:>18}" for pair in pairs) + "\n"
    return text
