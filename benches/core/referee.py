"""Plays drivers in their interpreters and gathers the lines they print.

Invariant: within a round the peers come first and ours after them, so that a slow minute of the
machine falls on both; each driver is a separate process. A peer that is not installed is left out
and said so, with the command that installs it; a driver that fails ends everything with its own
words. Cost: that of the drivers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.core.rows import OURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benches.core.rows import Game, Play

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "benches/peers/envs"
PRINTED = 20  # last lines of a driver that failed


class DriverError(Exception):
    """A driver that failed, with what it said."""


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement as its driver printed it."""

    peer: str
    what: str
    value: float
    unit: str
    context: dict[str, Any]


def interpreter(environment: str) -> Path | None:
    """The interpreter of an environment, or None where it is not installed."""
    if environment == OURS:
        return Path(sys.executable)
    folder = ENVIRONMENTS / environment
    return folder / "bin/python" if (folder / ".ready").exists() else None


def missing(games: Iterable[Game]) -> list[str]:
    """A line for each peer that is asked for and not installed."""
    environments = dict.fromkeys(play.environment for game in games for play in game.peers)
    return [
        f"{name}: skipped, not installed; `make peers ARGS={name}` does it (Linux x86-64, "
        "Python 3.11)"
        for name in environments
        if interpreter(name) is None
    ]


def schedule(games: Iterable[Game], rounds: int, *, peers: bool) -> list[Play]:
    """Every play in its order: by game, by round, peers first and ours after them."""
    plays: list[Play] = []
    for game in games:
        players = [*(game.peers if peers else ()), *game.ours]
        players = [play for play in players if interpreter(play.environment) is not None]
        plays += players * (1 if game.once else rounds)
    return plays


def run(play: Play) -> list[Line]:
    """Play one driver and read its lines."""
    python = interpreter(play.environment)
    assert python is not None, play
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        (str(python), "-m", play.module, *play.arguments),
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-PRINTED:])
        name = " ".join((play.module, *play.arguments))
        raise DriverError(f"{name} ended with {done.returncode}:\n{output}")
    lines = parse(done.stdout.splitlines())
    if not lines:
        raise DriverError(f"{play.module} printed no measurement:\n{done.stdout}")
    return lines


def parse(printed: Sequence[str]) -> list[Line]:
    """The measurements among what was printed; peers also print banners."""
    lines: list[Line] = []
    for text in printed:
        if not text.startswith("{"):
            continue
        try:
            settings = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not {"peer", "what", "value", "unit"} <= settings.keys():
            continue
        head = (
            settings.pop("peer"),
            settings.pop("what"),
            float(settings.pop("value")),
            settings.pop("unit"),
        )
        lines.append(Line(*head, settings))
    return lines
