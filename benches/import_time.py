"""Time of `import numpy, kvtrie` compared with `import numpy`, in fresh interpreters, in turn.

The goal is numpy's time plus 25 ms. Prints both medians and the difference.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benches.core.place import place
from benches.record import keep, options

RUNS = 15
GOAL_MS = 25.0
TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def import_ms(module: str) -> float:
    """Milliseconds that one fresh interpreter needs to import a module."""
    command = [sys.executable, "-c", TIMED.format(module)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return 1e3 * float(out.stdout)


def main() -> None:
    """Measure in turn, so that a slow moment of the machine falls on both."""
    given = options(__doc__).parse_args()
    modules, runs = ("numpy", "numpy, kvtrie"), 1 if given.quick else RUNS
    for module in modules:  # fills the page cache and writes the bytecode
        import_ms(module)
    times = [[import_ms(module) for module in modules] for _ in range(runs)]
    medians = dict(zip(modules, map(statistics.median, zip(*times, strict=True)), strict=True))
    extra = medians["numpy, kvtrie"] - medians["numpy"]
    if keep(given, {"place": place(), "ms": medians, "ok": extra <= GOAL_MS}):
        return
    for module, median in medians.items():
        print(f"import {module:<13} {median:7.1f} ms  (median of {runs})")
    print(f"difference           {extra:7.1f} ms  (goal: at most {GOAL_MS:.0f})")


if __name__ == "__main__":
    main()
