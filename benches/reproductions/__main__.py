"""Published figures and scenarios, played again: a table, and benches/results/reproductions.json.

    make reproductions ARGS="--trace mooncake_conversation_trace.jsonl"

The published trace is not part of the project: without it (`--trace` or KVTRIE_TRACE) its rows are
left out. `SHAREGPT=FILE` plays the real conversations; kvcache-simulator is played where
`make peers ARGS=kvcache-simulator` has installed it. What cannot be reproduced is printed with the
reason. Cost: three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benches.core.place import place
from benches.core.referee import ROOT
from benches.record import Result, document, write
from benches.reproductions.mooncake import hits_by_block, tokens_of_last_half
from benches.reproductions.order import scenarios
from benches.reproductions.policies import FILE, compared

OUT = ROOT / "benches/results/reproductions.json"
TRACE = "KVTRIE_TRACE"
WIDE = 120
CANNOT = {
    "Pensieve's own latencies and throughput (section 6)": "needs its arrival times and the step "
    "times of its A100",
    "Mooncake's TTFT and goodput": "needs its cluster's lanes and step times",
    "token hits with contents (Azure, BurstGPT)": "the traces have lengths alone",
}


def main() -> int:
    """Play, report, and keep what was whole."""
    parser = argparse.ArgumentParser(
        prog="benches.reproductions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, default=os.environ.get(TRACE), metavar="FILE")
    parser.add_argument("--out", type=Path, default=OUT, help="where to write the document")
    parser.add_argument("--json", action="store_true", help="print the document, not the table")
    given = parser.parse_args()
    rows, said = scenarios(), []
    if given.trace is None:
        said.append(f"conversation trace: left out, neither --trace nor {TRACE} names its file")
    else:
        rows += hits_by_block(Path(given.trace))
        tokens, notes = tokens_of_last_half(Path(given.trace))
        rows, said = rows + tokens, said + notes
    policies, notes = compared()
    rows, said = rows + policies, said + notes
    if FILE not in os.environ:
        said.append(f"ShareGPT: played from its means, {FILE} names no file")
    kept = document({**place(), "said": said, "cannot": CANNOT}, rows)
    if given.trace is not None or given.out != OUT:
        write(given.out, kept)
    if given.json:
        sys.stdout.write(json.dumps(kept, ensure_ascii=False) + "\n")
    else:
        show(rows, said)
    return 0 if all(row.ok is not False for row in rows) else 1


def show(rows: list[Result], said: list[str]) -> None:
    """The table, what was left out, and what cannot be."""
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    table = Table()
    for head in ("what", "ours", "peer", "whose", "ratio", "ok"):
        table.add_column(head, justify="left" if head in {"what", "whose"} else "right")
    for row in rows:
        ok = "" if row.ok is None else "yes" if row.ok else "NO"
        cells = (row.what, row.ours, row.peer, row.peer_name, row.ratio, ok)
        table.add_row(*map(str, cells))
    console.print(table)
    for words in said:
        console.print(words, markup=False, highlight=False)
    for what, why in CANNOT.items():
        console.print(f"not reproduced: {what}: {why}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
