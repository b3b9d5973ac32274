"""The simulator's speed, in processor seconds of one run: a table, and benches/results/sim.json.

    make bench-sim ARGS="--trace mooncake_conversation_trace.jsonl"

`limit` compares a run in Rust with its calls to managers alone, by engine and tiers; the ratio may
not be above the goal. The other rows compare a whole run, from the file to the figures, with
Dynamo's mocker on the same trace with the same rooms, machines and bandwidths; each has its
step times. The published trace is not part of the project: `--trace` or KVTRIE_TRACE names it.
Cost: three minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benches.core.place import place
from benches.core.referee import ROOT, Line, interpreter, run
from benches.core.rows import OURS, Play
from benches.record import Result, document, keep, options, show
from kvtrie.sim.trace import iter_trace

OUT = ROOT / "benches/results/sim.json"
TRACE = "KVTRIE_TRACE"
PROGRAM = ROOT / "target/release/examples/limit"
PEER = "dynamo"
GPU, HOST = 5859, 40_000
LIMITS = {"serial": 1.5, "continuous": 3.0}
GOALS = {"one_tier": 10.0, "host_tier": 3.0, "4_machines": 8.0, "16_machines": 8.0}
RUNS = 3  # of each, of which the best counts: a core's speed differs from minute to minute


def limits(trace: Path) -> list[Result]:
    """A run and its calls alone, per engine, without and with a host tier."""
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "trace.txt"
        with lines.open("w") as file:
            for request in iter_trace(trace):
                head = (request.at, request.input_tokens, request.output_tokens)
                file.write(" ".join(map(str, (*head, *request.blocks.tolist()))) + "\n")
        for engine, most in LIMITS.items():
            for host in (0, HOST):
                words = (str(PROGRAM), str(lines), engine, str(GPU), str(host))
                triples = [
                    tuple(map(int, subprocess.check_output(words, text=True).split()))
                    for _ in range(RUNS)
                ]
                ours, calls_s, calls = map(min, zip(*triples, strict=True))
                rows.append(
                    Result(
                        what=f"limit.{engine}.{'host_tier' if host else 'one_tier'}",
                        ours=round(ours / 1e9, 4),
                        unit="s",
                        peer=round(calls_s / 1e9, 4),
                        peer_name="managers alone",
                        ratio=round(ours / calls_s, 3),
                        goal=most,
                        ok=ours <= most * calls_s,
                        more={"calls": calls, "better": "below"},
                    )
                )
    return rows


def beside(trace: Path) -> tuple[list[Result], list[str]]:
    """Whole runs compared with the mocker's, in turns, the best of each."""
    plays = [Play(OURS, "benches.ours.simulation", (str(trace),))]
    notes: list[str] = []
    if interpreter(PEER) is None:
        notes.append(f"{PEER}: not installed; `make peers ARGS={PEER}` does it")
    else:
        plays.append(Play(PEER, "benches.peers.dynamo_replay", (str(trace),)))
    best: list[dict[str, Line]] = [{} for _ in plays]
    for _ in range(RUNS):
        for play, seen in zip(plays, best, strict=True):
            for line in run(play):
                if line.what not in seen or line.value < seen[line.what].value:
                    seen[line.what] = line
    theirs = best[1] if len(best) > 1 else {}
    rows: list[Result] = []
    for line in best[0].values():
        peer = theirs.get(line.what)
        ratio = peer.value / line.value if peer else None
        rows.append(
            Result(
                what=line.what,
                ours=line.value,
                unit=line.unit,
                peer=peer.value if peer else None,
                peer_name=peer.peer if peer else "-",
                ratio=ratio and round(ratio, 2),
                goal=GOALS[line.what],
                ok=None if ratio is None else ratio >= GOALS[line.what],
                more={"ours": line.context, "peer": peer.context if peer else None},
            )
        )
    return rows, notes


def main() -> int:
    """Play, report, record."""
    parser = options(__doc__, OUT)
    parser.add_argument("--trace", type=Path, default=os.environ.get(TRACE), metavar="FILE")
    given = parser.parse_args()
    if given.trace is None:
        parser.error(f"neither --trace nor {TRACE} names the trace")
    trace = Path(given.trace).absolute()
    rows = limits(trace)
    runs, notes = beside(trace)
    rows += runs
    if not keep(given, document({**place(), "said": notes}, rows)):
        show(rows, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
