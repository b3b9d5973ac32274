"""Workload of a profile-guided build: requests, evictions, offloading, stores, decoding.

`maturin --pgo` runs it with an instrumented build, and optimises the branches that ran often.
Seeds, sizes and lengths are others than those that `benches.core` measures. Cost: about 20 seconds.
"""

from __future__ import annotations

import subprocess
import sys

SEED = "7"
POLICIES = ("retention", "lru", "learned")
OTHERS = ("fifo", "lfu", "flat")
PLAYS = (
    *(f"request --policy {policy} --blocks 20000 --conversations 3000" for policy in POLICIES),
    *(f"leaves --policy {policy} --leaves 20000 --steps 5000" for policy in POLICIES + OTHERS),
    "offload --conversations 3000",
    "store --blocks 50000 --calls 500",
    "decode",
)


def main() -> None:
    """Play everything."""
    for play in PLAYS:
        name, *arguments = play.split()
        command = [sys.executable, "-m", f"benches.ours.{name}", *arguments, "--seed", SEED]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
