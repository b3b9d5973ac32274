"""Shared stores that fail under three processes: wrong blocks, late requests, hits after recovery.

`python -m tests.faults_remote [STORE …] --ops 2000 --seed 1 --json PATH`. Three processes answer
requests on one store at once and compare every byte, while this one kills, stops, fills and slows
the store, damages values, and kills the processes. Exit status 1 if a goal is missed.
Invariant: a fault is drawn from the seed; the interleaving of the processes is not.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests import namespace, partition, store_servers
from tests.remote_campaign import RECOVERED, SLACK_S, Campaign
from tests.remote_stores import STORES

NAMESPACED = {"mooncake": namespace.possible, "partition": partition.possible}
"""Stores that are played in a network namespace, and whether this user may make one."""
PROGRAMS = {**store_servers.PROGRAMS, "partition": store_servers.PROGRAMS["valkey"]}


def measure(name, wanted, seed, context):
    """The figures of one store."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(STORES[name](folder))
        began = time.monotonic()
        campaign = Campaign(store, context, f"{name} {seed}")
        stack.callback(campaign.close)
        stack.callback(store.heal)
        campaign.play(wanted)
        recoveries = [campaign.recover(outage) for outage in store.outages]
        late = sorted(campaign.late)
        return {
            "store": name,
            "operations": sum(campaign.operations.values()),
            "by kind": dict(campaign.operations.most_common()),
            "wrong": campaign.errors.pop("wrong", 0),
            "without room": campaign.errors.pop("no space", 0),
            "errors": dict(campaign.errors),
            "requests": len(late),
            "share found": campaign.hits / campaign.tokens,
            "late": sum(seconds > SLACK_S for seconds in late),
            "late after": dict(campaign.after),
            "latest_s": late[-1],
            "recovery": recoveries,
            "seconds": time.monotonic() - began,
        }


def misses(figures):
    """The goals that one store's figures miss."""
    found = [f"{figures['wrong']} wrong blocks"] * bool(figures["wrong"])
    found += [f"{error}: {count}" for error, count in figures["errors"].items()]
    if figures["late"]:
        found.append(f"{figures['late']} late requests, the latest by {figures['latest_s']:.2f} s")
    found += [
        f"{one['hits after']} of {one['hits before']} hits after {one['outage']}"
        for one in figures["recovery"]
        if one["hits after"] < RECOVERED * one["hits before"] or one["share before"] < RECOVERED
    ]
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stores", nargs="*", metavar="STORE", help=", ".join(STORES))
    parser.add_argument("--ops", type=int, default=2000, help="operations per store")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", type=Path, help="write the figures")
    given = parser.parse_args(arguments)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.remote_requests"])
    logging.disable(logging.WARNING)
    results, missed = [], False
    for name in given.stores or STORES:
        if not PROGRAMS.get(name, Path()).exists():
            sys.stdout.write(f"{name}: not run, no server: make stores\n")
            continue
        if name not in NAMESPACED or namespace.INSIDE:
            figures = measure(name, given.ops, given.seed, context)
        elif NAMESPACED[name]():
            figures = _namespaced(name, given)
        else:
            sys.stdout.write(f"{name}: not run, no network namespace\n")
            continue
        results.append(figures)
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
        for goal in misses(figures):
            missed = True
            sys.stdout.write(f"{name}: {goal}\n")
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(missed)


def _namespaced(name, given):
    """The figures of a store that is played in a network namespace."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        words = (name, "--ops", given.ops, "--seed", given.seed, "--json", out)
        namespace.run("tests.faults_remote", *words, stdout=subprocess.DEVNULL)
        (figures,) = json.loads(out.read_text())
    return figures


if __name__ == "__main__":
    sys.exit(main())
