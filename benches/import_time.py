"""How long `import kvtrie` takes beside `import numpy`, each in fresh interpreters, in turn.

The goal is numpy's time plus 30 ms. Prints both medians and the difference.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 15
GOAL_MS = 30.0
TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def import_ms(module: str) -> float:
    """Milliseconds that one fresh interpreter needs to import a module."""
    command = [sys.executable, "-c", TIMED.format(module)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return 1e3 * float(out.stdout)


def main() -> None:
    """Measures in turn, so that a slow moment of the machine falls on both."""
    modules = ("numpy", "kvtrie")
    for module in modules:  # fills the page cache and writes the bytecode
        import_ms(module)
    times = {module: [] for module in modules}
    for _ in range(RUNS):
        for module in modules:
            times[module].append(import_ms(module))
    medians = {module: statistics.median(each) for module, each in times.items()}
    for module, median in medians.items():
        print(f"import {module:<7} {median:7.1f} ms  (median of {RUNS})")
    extra = medians["kvtrie"] - medians["numpy"]
    print(f"difference     {extra:7.1f} ms  (goal: at most {GOAL_MS:.0f})")


if __name__ == "__main__":
    main()
