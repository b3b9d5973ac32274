"""Published figures and scenarios, played again: a table, and benches/results/reproductions.json.

    make reproductions ARGS="--trace mooncake_conversation_trace.jsonl"

The published trace is not part of the project: without it (`--trace` or KVTRIE_TRACE) its rows are
left out. `SHAREGPT=FILE` plays the real conversations; kvcache-simulator is played if
`make peers ARGS=kvcache-simulator` has installed it. Figures that cannot be reproduced are printed
with the reason. Cost: three minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benches.core.place import place
from benches.core.referee import ROOT
from benches.record import document, keep, options, show
from benches.reproductions.mooncake import hits_by_block, tokens_of_last_half
from benches.reproductions.order import scenarios
from benches.reproductions.policies import FILE, REQUESTS, compared

OUT = ROOT / "benches/results/reproductions.json"
TRACE = "KVTRIE_TRACE"
QUICK = 200  # requests
CANNOT = {
    "Pensieve's own latencies and throughput (section 6)": "needs its arrival times and the step "
    "times of its A100",
    "Mooncake's TTFT and goodput": "needs its cluster's lanes and step times",
    "token hits with contents (Azure, BurstGPT)": "the traces have lengths alone",
}


def main() -> int:
    """Play, report, and keep what was whole."""
    parser = options(__doc__, OUT)
    parser.add_argument("--trace", type=Path, default=os.environ.get(TRACE), metavar="FILE")
    given = parser.parse_args()
    if given.trace is None:
        given.default_out = None  # a record without the published figures would replace them
    rows, remarks = scenarios(), []
    if given.trace is None:
        remarks.append(f"conversation trace: left out, neither --trace nor {TRACE} names its file")
    else:
        rows += hits_by_block(Path(given.trace))
        tokens, notes = tokens_of_last_half(Path(given.trace))
        rows, remarks = rows + tokens, remarks + notes
    policies, notes = compared(QUICK if given.quick else REQUESTS)
    rows, remarks = rows + policies, remarks + notes
    if FILE not in os.environ:
        remarks.append(f"ShareGPT: played from its means, {FILE} names no file")
    if not keep(given, document({**place(), "said": remarks, "cannot": CANNOT}, rows)):
        show(rows, [*remarks, *(f"not reproduced: {what}: {why}" for what, why in CANNOT.items())])
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
