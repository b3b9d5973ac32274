"""Play the same chats by round-robin, by an index and by a selection service, and compare.

    python -m examples.cluster --plot cluster.png

Each play starts three engines with empty caches. With `--plot` two more plays kill an engine after
a third of the turns and start it again at half of them. Exit status: 0 if every answer and every
block found was right; 1 if not, or if a process did not start; 2 for a wrong argument; 130 after
Ctrl-C. Cost: a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.cluster.play import Played, Player, Workload
from examples.cluster.processes import DYNAMO, Cluster, StartError, in_namespace
from examples.cluster.routers import IndexRouter, RoundRobin, Router, selection_router
from kvtrie import ConfigError
from kvtrie.cluster import DynamoSelector

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTERS = ("round-robin", "index", "selector")
KILLED = 1
BLOCKS = (192, 384, 1024)
"""Blocks of an engine on gpu, host and disk."""


def main() -> int:
    """Run the example, print its report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.cluster")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", type=Path, help="kill an engine, and draw it here")
    parser.add_argument("--chats", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=12, help="of a chat (default: %(default)s)")
    parser.add_argument("--dynamo", type=Path, default=DYNAMO, help="Python with Dynamo")
    given = parser.parse_args()
    if given.chats < 1 or given.turns < 1:
        parser.error("--chats and --turns are at least 1")
    if not given.dynamo.exists():
        return _end(f"{given.dynamo} is not there: make peers ARGS=dynamo", 1)
    try:
        status = in_namespace("examples.cluster", sys.argv[1:])
        return _run(given) if status is None else status
    except KeyboardInterrupt:
        return _end("Stopped.", 130)
    except (StartError, ConfigError) as error:
        return _end(str(error), 1)


def _run(given: argparse.Namespace) -> int:
    load = Workload(chats=given.chats, turns=given.turns)
    plays: dict[str, Played] = {}
    killed = {f"{name}, killed": name for name in (ROUTERS[0], ROUTERS[-1])}
    for label, name in [
        *zip(ROUTERS, ROUTERS, strict=True),
        *(killed.items() if given.plot else ()),
    ]:
        plays[label] = _play(name, load, given.dynamo, kill=label in killed)
        if not given.json:
            print(_line(label, plays[label]), flush=True)
    if given.plot is not None:
        from examples.cluster.picture import draw

        draw(given.plot, {name: plays[label] for label, name in killed.items()})
    report = _report(plays)
    print(json.dumps(report | {"plays": _turns(plays)}) if given.json else _sentence(report))
    return 0 if report["ok"] else 1


def _play(name: str, load: Workload, dynamo: Path, *, kill: bool) -> Played:
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), BLOCKS, python=dynamo) as cluster,
        closing(_router(name, cluster)) as router,
    ):
        player = Player(router, [engine.settings for engine in cluster.engines])
        engine, turns = cluster.engines[KILLED], load.chats * load.turns

        def killed() -> str:
            engine.kill()
            return f"engine {KILLED} is killed"

        def add() -> None:
            engine.await_start()
            if isinstance(router, DynamoSelector):  # live at once, without waiting for a probe
                at = engine.settings
                router.add(at.machine, events=at.events, replay=at.replay)

        starting = threading.Thread(target=add)

        def again() -> str:
            engine.begin()
            starting.start()
            return f"engine {KILLED} starts again"

        events: dict[int, Callable[[], str]] = {turns // 3: killed, turns // 2: again}
        played = player.play(load, events if kill else {})
        if kill:
            starting.join()
        return played


def _router(name: str, cluster: Cluster) -> Router:
    engines = [engine.settings for engine in cluster.engines]
    if name == "round-robin":
        return RoundRobin(len(engines))
    if name == "index":
        return IndexRouter(cluster.indexer.url, engines)
    return selection_router(cluster.selector.url, engines)


def _report(plays: dict[str, Played]) -> dict[str, Any]:
    """Counts by router, and prompt tokens computed by round-robin as a multiple of the others'."""
    turns = [turn for played in plays.values() for turn in played.turns]
    wrong = sum(turn.wrong for turn in turns)
    unanswered = sum(bool(turn.error) for turn in turns)
    computed = {name: played.computed for name, played in plays.items()}
    base = computed.get(ROUTERS[0], 0)
    return {
        "ok": not wrong and not unanswered,
        "wrong": wrong,
        "unanswered": unanswered,
        "computed": computed,
        "found": {name: played.found for name, played in plays.items()},
        "ratio": {name: base / max(count, 1) for name, count in computed.items() if base},
    }


def _turns(plays: dict[str, Played]) -> dict[str, Any]:
    return {
        name: {"turns": [asdict(turn) for turn in played.turns], "marks": played.marks}
        for name, played in plays.items()
    }


def _line(name: str, played: Played) -> str:
    waits = sorted(turn.first_token_s for turn in played.turns)
    again = sum(len(turn.machines) > 1 for turn in played.turns)
    return (
        f"{name:20} {len(waits)} turns, {100 * played.found:3.0f} % of prompt tokens found, "
        f"{played.computed:6} computed, first token after {1e3 * waits[len(waits) // 2]:.0f} ms "
        f"(median), {1e3 * waits[-1]:.0f} ms (most), {again} turns sent again"
    )


def _sentence(report: dict[str, Any]) -> str:
    if not report["ok"]:
        return f"{report['wrong']} wrong tokens, {report['unanswered']} turns without an answer."
    ratios = [f"{ratio:.2f} ({name})" for name, ratio in report["ratio"].items()]
    return f"All blocks and answers are right. Round-robin computes times {', '.join(ratios)}."


def _end(why: str, status: int) -> int:
    print(why, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
