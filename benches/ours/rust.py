"""Figures of the core's criterion benchmarks, as lines of ours.

Runs criterion with a filter and reads its samples: the exact victim at a million entries, alone and
in leaf runs, and the restore plan. Python has no call as small. Cost: a build, if needed, then half
a minute each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np

from benches.measure import emit

# By game: the benchmark, its filter, and for what it measures criterion's identifier (with one gap,
# as the number of classes stands in it), the unit, and how much of that a nanosecond is.
RETENTION = "^retention, epsilon (0|1/64)/in time, .*1000000$"
RUNS = "victims in leaf runs of 30"
LEFT = 200 * 30  # blocks that are timed together
BENCHES = {
    "victim": (
        "eviction",
        RETENTION,
        {
            f"victim.{what}{name}": (f"retention, epsilon {epsilon}/in time, {of}", "us", factor)
            for epsilon, name in (("0", ""), ("1/64", ".default"))
            for what, of, factor in (
                ("one", "alone, */1000000", 1e-3 / 30),
                ("newcomer", "with a newcomer, */1000000", 1e-3),
            )
        },
    ),
    "runs": (
        "leaf_runs",
        f"^{RUNS}/",
        {
            "victim.run": (f"{RUNS}/epsilon 0/1000000", "us", 1e-3 / LEFT),
            "victim.run.default": (f"{RUNS}/epsilon 1/64/1000000", "us", 1e-3 / LEFT),
        },
    ),
    "plan": (
        "plan",
        "^plan of 256 blocks/",
        {
            "plan.eighth": ("plan of 256 blocks/every eighth a hole", "us", 1e-3),
            "plan.third": ("plan of 256 blocks/every third", "us", 1e-3),
        },
    ),
}


def median_ns(folder: Path, pattern: str) -> tuple[float, int]:
    """Median nanoseconds of an iteration, and the number of samples, of the newest run."""
    found = [path for path in folder.rglob("new/benchmark.json") if fits(path, pattern)]
    newest = max(found, key=lambda path: path.stat().st_mtime)
    sample = json.loads(newest.with_name("sample.json").read_text())
    each = np.array(sample["times"]) / np.array(sample["iters"])
    return float(np.median(each)), len(each)


def fits(path: Path, pattern: str) -> bool:
    """Whether a result is of that benchmark, whose identifier may have one gap."""
    front, _, back = pattern.partition("*")
    name = json.loads(path.read_text())["full_id"]
    return name == pattern if not back else name.startswith(front) and name.endswith(back)


def target() -> Path:
    """Folder of cargo's results."""
    command = ("cargo", "metadata", "--format-version", "1", "--no-deps")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Path(json.loads(output)["target_directory"], "criterion")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=BENCHES)
    given = parser.parse_args()
    bench, only, wanted = BENCHES[given.what]
    command = ("cargo", "bench", "--quiet", "-p", "kvtrie-bench", "--bench", bench, "--", only)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    folder = target()
    for what, (pattern, unit, factor) in wanted.items():
        ns, samples = median_ns(folder, pattern)
        emit("kvtrie", what, factor * ns, unit, samples=samples, bench=bench)


if __name__ == "__main__":
    main()
