"""Ours and the peers on the common trace, in one run: the table, and benches/results/core.json.

    make bench-core ARGS="--only request --without-peers"

Rows whose names begin with one of `--only` are played, all without it. Rounds alternate: the peers,
then ours, and again; best and median of the rounds are reported, ratios are of the bests. A game
that was played with all its rows and peers replaces that game's part of the document, at once, so
that a run can be ended and taken up again; `--out` writes what was played, and nothing else, there.
Cost: half an hour with the peers, ten minutes without, on two cores.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from benches.core.place import place
from benches.core.referee import ROOT, DriverError, Line, missing, run, schedule
from benches.core.report import PlayedWronglyError, check, rows_of, table
from benches.core.rows import GAMES, chosen, quick
from benches.record import Result, document, keep, options, read, write
from benches.workload import CONVERSATIONS, LRU_POOL, SEED
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benches.core.rows import Game, Play

OUT = ROOT / "benches/results/core.json"
WIDE = 140


def main() -> int:
    """Play, check, report."""
    parser = options(__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="of rows")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=2, help="two at least give a median")
    given = parser.parse_args()
    given.without_peers |= given.quick
    given.rounds = 1 if given.quick else given.rounds
    games, screen = chosen(given.only), Console(stderr=True)
    games = [quick(game) for game in games] if given.quick else games
    if not games:
        names = ", ".join(row.what for game in GAMES for row in game.rows)
        parser.error(f"no row's name begins with {' or '.join(given.only)}; there are {names}")
    if given.rounds < 1:
        parser.error(f"{given.rounds} rounds measure nothing")
    for words in [] if given.without_peers else missing(games):
        screen.print(words, highlight=False)
    try:
        where, rows = play(games, given, screen)
    except (DriverError, PlayedWronglyError) as error:
        screen.print(str(error), markup=False, highlight=False)
        return 1
    if keep(given, document(where, rows)):
        return 0
    show(where, rows, Console(width=None if sys.stdout.isatty() else WIDE))
    return 0


def play(
    games: Sequence[Game], given: argparse.Namespace, screen: Console
) -> tuple[dict[str, Any], list[Result]]:
    """Every game; each is put on record as soon as it is over, if it was whole."""
    where: dict[str, Any] = {**place(), "policy": DEFAULT_POLICY, "games": {}}
    rows: list[Result] = []
    peers = not given.without_peers
    plays = [schedule([game], given.rounds, peers=peers) for game in games]
    with Progress(console=screen, transient=True) as bar:
        task = bar.add_task("Playing", total=sum(map(len, plays)))
        for game, turns in zip(games, plays, strict=True):
            machine, began = place(), time.monotonic()
            lines = [line for turn in turns for line in watched(turn, bar, task)]
            shares = check(lines)
            where["games"][game.name] = {
                **machine,
                "policy": DEFAULT_POLICY,
                "load_after": place()["load"],
                "seconds": round(time.monotonic() - began),
                "rounds": 1 if game.once else given.rounds,
                "trace": {"seed": SEED, "conversations": CONVERSATIONS, "pool": LRU_POOL},
                "hit_shares": shares,
                "lines": [row_of(line) for line in lines],
            }
            rows += rows_of([game], lines)
            if given.out is None and peers and game in GAMES and not missing([game]):
                record(where, rows, game.name)
    return where, rows


def watched(turn: Play, bar: Progress, task: Any) -> list[Line]:
    """Run one play, show its progress on the bar, and return its lines."""
    bar.update(task, description=" ".join((turn.module.rpartition(".")[2], *turn.arguments)))
    lines = run(turn)
    bar.advance(task)
    return lines


def row_of(line: Line) -> dict[str, Any]:
    """A line as it is kept."""
    head = {"peer": line.peer, "what": line.what, "value": line.value, "unit": line.unit}
    return {**head, **line.context}


def record(where: dict[str, Any], rows: Sequence[Result], game: str) -> None:
    """Put one game's part into the document that is kept."""
    before, recorded = read(OUT)
    games = {**before.get("games", {}), game: where["games"][game]}
    merged = [row for row in recorded if row.more["game"] != game]
    merged += [row for row in rows if row.more["game"] == game]
    order = [each.name for each in GAMES]
    merged.sort(key=lambda row: order.index(row.more["game"]))
    write(OUT, document({**where, "games": games}, merged))


def show(where: dict[str, Any], rows: Sequence[Result], console: Console) -> None:
    """The table, the shares that were checked, and how many goals are reached."""
    console.print(table(rows))
    for game in where["games"].values():
        for words in game["hit_shares"]:
            console.print(words, highlight=False)
    judged = [row.ok for row in rows if row.ok is not None]
    console.print(f"{sum(judged)} of {len(judged)} goals reached", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
