"""The fault campaign: devices that fail in every way we know, under random conversations.

First an engine without a model over memory and storages that fail, through the executor; every byte
that a plan calls reused is compared. Then the disk tier's own campaign, in Rust, below its files.
Prints a table of kinds and counts. Exit status 1 if a block is wrong or a request does not end.
Cost: about a minute per thousand requests and kind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "transfer"))

from faulty import FAULTS, OPERATIONS, Ask, Engine, World  # noqa: E402 - behind its folder

WORLDS = [
    World(structure=structure, layer_slots=slots, workers=2, load=load)
    for structure, slots in (
        ("leaf-only", (False, False)),
        ("holes", (False, False)),
        ("holes", (True, False)),
        ("holes", (True, True)),
    )
    for load in ("all", "plan")
]


def campaign(fault: str, requests: int, console: Console) -> dict[str, object]:
    """Serve `requests` requests while one operation in fifteen fails in this way."""
    faults = reused = computed = done = 0
    wrong: list[str] = []
    share = -(-requests // len(WORLDS))
    for number, world in enumerate(track(WORLDS, description=f"{fault:>6}", console=console)):
        draw = random.Random(number)

        def plan(operation: str, draw: random.Random = draw) -> str | None:
            return fault if operation in OPERATIONS and draw.random() < 1 / 15 else None

        engine = Engine(world, plan)
        while engine.tally.requests < share:
            asks = [
                Ask(
                    base=draw.randrange(8),
                    cut=draw.randrange(17),
                    fresh=draw.randrange(1, 9),
                    answer=draw.randrange(4),
                )
                for _ in range(draw.randrange(1, 3))
            ]
            engine.serve(asks)
        engine.close()
        faults += sum(engine.faults.injected.values())
        done += engine.tally.requests
        reused += engine.tally.reused
        computed += engine.tally.computed
        wrong += engine.wrong
    row: dict[str, object] = {"kind": fault, "faults": faults, "requests": done}
    return row | {"reused": reused, "computed": computed, "wrong": len(wrong), "what": wrong[:5]}


def store(cases: int, console: Console) -> bool:
    """The campaign of the disk tier's files; tells whether it went well."""
    console.print("\nBelow the disk tier's files (cargo):")
    test = ["-p", "kvtrie-store", "--test", "faults", "--", "--ignored", "--nocapture"]
    told = subprocess.run(
        ["cargo", "test", "-q", *test],  # noqa: S607 - the one that built the extension
        cwd=HERE.parent,
        env={**os.environ, "KVTRIE_FAULTS": str(cases)},
        capture_output=True,
        text=True,
        check=False,
    )
    console.print(told.stdout if told.returncode == 0 else told.stdout + told.stderr, markup=False)
    return told.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve requests while devices fail.")
    parser.add_argument("--cases", type=int, default=2000, help="requests, and cases, per kind")
    parser.add_argument("--python-only", action="store_true", help="leave out the part in Rust")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    console = Console(stderr=given.json)
    rows = [campaign(fault, given.cases, console) for fault in FAULTS]
    table = Table("kind", "faults", "requests", "tokens reused", "tokens computed", "wrong blocks")
    for row in rows:
        table.add_row(*(str(row[name]) for name in list(row)[:-1]))
    console.print(table)
    ok = all(row["wrong"] == 0 for row in rows)
    if not given.python_only:
        ok = store(given.cases, console) and ok
    if given.json:
        sys.stdout.write(json.dumps({"rows": rows, "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
