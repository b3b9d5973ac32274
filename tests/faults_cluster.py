"""Engines, services and a store that fail under chats: wrong blocks, late requests, hits after it.

`python -m tests.faults_cluster --turns 40 --json PATH`, in a network namespace. Three engines of
`examples/cluster` over one Valkey answer chats that Dynamo's selection service routes, and its
indexer is asked for each prompt too. While the chats go on, each process is killed and stopped in
turn, the link to one engine goes down, and the store is full. Exit status 1 if a goal is missed.
Invariant: each fault begins and ends while requests are in flight.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from tests import namespace, partition, store_servers

from examples.cluster import model
from examples.cluster.engine import LOAD_S, LOOKUP_S
from examples.cluster.play import TIMEOUT_S, Player
from examples.cluster.processes import DYNAMO, MACHINES, Cluster
from examples.cluster.routers import ASK_S, IndexRouter, selection_router

CLIENTS, CHATS, TURNS = 8, 2, 6
BLOCKS = (192, 384, 1024)
RECOVERED = 0.9
SLACK_S = 0.5  # of the machine's scheduler, per request
WINDOWS = 6  # of requests, within which hits are to come back
WINDOW_S, FAULT_S = 2.0, TIMEOUT_S + 2.0  # so that requests are sent again while a fault lasts
_PATIENCE_S = 180.0
FAR = 2


class Routed:
    """The selection service chooses; the indexer is asked for each prompt, and timed."""

    def __init__(self, cluster):
        engines = [engine.settings for engine in cluster.engines]
        self.selector = selection_router(cluster.selector.url, engines)
        self.index = IndexRouter(cluster.indexer.url, engines).index
        self.asked = self.known = 0
        self.longest_s = 0.0

    def pick(self, name, tokens):
        began = time.monotonic()
        held = self.index.match(tokens, deadline_s=ASK_S)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.asked, self.known = self.asked + 1, self.known + bool(held)
        return self.selector.pick(name, tokens, expected_output=16)

    def prefilled(self, name):
        self.selector.prefilled(name)

    def done(self, name, *, failed=False):
        self.selector.done(name, failed=failed)

    def close(self):
        self.selector.close()
        self.index.close()


class Campaign:
    """Chats without end, and faults among them."""

    def __init__(self, cluster, router, seed):
        self.router = router
        self.player = Player(router, [engine.settings for engine in cluster.engines])
        self.faults = []
        self._over = threading.Event()
        self._seed = seed
        systems = random.Random(seed)
        self._systems = [[systems.randrange(model.VOCABULARY) for _ in range(128)] for _ in "abc"]
        self._threads = [threading.Thread(target=self._client, args=(at,)) for at in range(CLIENTS)]
        self._failed = []
        for thread in self._threads:
            thread.start()

    @property
    def turns(self):
        return self.player.played.turns

    def _client(self, at):
        rng = random.Random(f"{self._seed} {at}")
        try:
            while not self._over.is_set():
                chats = [list(system) for system in self._systems[:CHATS]]
                for turn in range(TURNS * CHATS):
                    if self._over.is_set():
                        return
                    chat = chats[turn % CHATS]
                    chat += [rng.randrange(model.VOCABULARY) for _ in range(80)]
                    chat += self.player.ask(chat)
        except BaseException as error:
            self._failed.append(repr(error))
            raise

    def window(self, count, seconds):
        """Wait for turns and seconds; the share of prompt tokens that the turns found."""
        first, began = len(self.turns), time.monotonic()
        while len(self.turns) < first + count or time.monotonic() < began + seconds:
            if self._failed or time.monotonic() > began + _PATIENCE_S:
                raise RuntimeError(f"no work goes on: {self._failed}, {len(self.turns)} turns")
            self._over.wait(0.02)
        turns = self.turns[first:]
        return sum(turn.found for turn in turns) / sum(turn.prompt for turn in turns)

    def fault(self, name, begin, end, count):
        """Begin a fault, end it after some turns, and see how soon hits are back."""
        before = self.window(count, WINDOW_S)
        first = len(self.turns)
        at = Counter(turn.machines[-1] for turn in self.turns[-count:] if turn.machines)
        begin()
        during = self.window(count, FAULT_S)
        end()
        after = []
        while len(after) < WINDOWS and max(after, default=0) < RECOVERED * before:
            after.append(self.window(count, WINDOW_S))
        turns = self.turns[first:]
        self.faults.append(
            {
                "fault": name,
                "machines": [at[machine] for machine in range(MACHINES)],
                "before": before,
                "during": during,
                "after": after,
                "turns": len(turns),
                "sent again": sum(len(turn.machines) > 1 for turn in turns),
                "latest_s": max(map(late, turns)),
                "longest_s": max(turn.seconds for turn in turns),
            }
        )
        row = self.faults[-1]
        sys.stdout.write(line(row) + "\n")
        sys.stdout.flush()

    def close(self):
        self._over.set()
        for thread in self._threads:
            thread.join()


def late(turn):
    """Seconds of a turn after all its deadlines and the time to compute it; negative in time."""
    lost = max(len(turn.machines) - 1, 0) * (TIMEOUT_S + 2 * ASK_S)
    return turn.seconds - turn.busy_s - lost - 2 * ASK_S - LOOKUP_S - LOAD_S


def line(row):
    after = ", ".join(f"{share:.2f}" for share in row["after"])
    return (
        f"{row['fault']:28} {row['turns']:4} turns, of the {sum(row['machines'])} before "
        f"{row['machines']} by machine; found {row['before']:.2f} before, {row['during']:.2f} "
        f"during, {after} after; {row['sent again']} sent again, the longest "
        f"{row['longest_s']:.2f} s, late by {max(row['latest_s'], 0):.2f} s"
    )


def play(campaign, cluster, server, link, count):
    """Each fault in turn."""
    campaign.window(3 * count, WINDOW_S)  # caches fill
    named = [(f"engine {at}", one) for at, one in enumerate(cluster.engines)]
    named += [("indexer", cluster.indexer), ("selection service", cluster.selector)]
    named.append(("Valkey", server))
    for name, process in named:
        campaign.fault(f"SIGSTOP of {name}", process.pause, process.resume, count)
    for name, process in named:
        campaign.fault(f"kill -9 of {name}", process.kill, process.start, count)
    if link is not None:
        campaign.fault(f"no link to engine {FAR}", link.cut, link.join, count)
    commands = [sys.executable, "-c", _SET_MEMORY, str(server.port)]
    campaign.fault(
        "full Valkey",
        lambda: subprocess.run([*commands, "1mb"], check=True),
        lambda: subprocess.run([*commands, "0"], check=True),
        count,
    )


_SET_MEMORY = """
import sys, redis
redis.Redis(port=int(sys.argv[1])).config_set("maxmemory", sys.argv[2])
"""


def reserved(cluster, router):
    """Requests that the service believes to be in flight, after all that is owed to it."""
    for _ in range(20):
        router.selector.done("nothing")
    with urllib.request.urlopen(f"{cluster.selector.url}/loads", timeout=5) as answer:  # noqa: S310
        loads = json.load(answer)
    return sum(row["active_requests"] for model in loads for row in model["loads"])


def report(campaign, cluster):
    """The figures of all turns, once no request is in flight."""
    turns, router = campaign.turns, campaign.router
    reservations = reserved(cluster, router)
    stats = router.selector.stats()
    return {
        "turns": len(turns),
        "wrong": sum(turn.wrong for turn in turns),
        "unanswered": sum(bool(turn.error) for turn in turns),
        "late": sum(late(turn) > SLACK_S for turn in turns),
        "latest_s": max(map(late, turns)),
        "twice to a dead machine": sum(
            one == other for turn in turns for one, other in pairwise(turn.machines)
        ),
        "picks": stats.picks,
        "in flight": sum(stats.requests.values()),
        "reserved": reservations,
        "index": {
            "asked": router.asked,
            "known": router.known,
            "longest_s": router.longest_s,
            "calls": router.index.stats().calls,
        },
        "faults": campaign.faults,
    }


def misses(figures):
    """The goals that the figures miss."""
    names = ("wrong", "unanswered", "late", "twice to a dead machine", "in flight", "reserved")
    found = [f"{figures[name]} {name}" for name in names if figures[name]]
    if figures["index"]["longest_s"] > ASK_S + SLACK_S:
        found.append(f"the index took {figures['index']['longest_s']:.2f} s")
    return found + [
        f"hits of {row['before']:.2f} were {max(row['after']):.2f} after {row['fault']}"
        for row in figures["faults"]
        if max(row["after"]) < RECOVERED * row["before"]
    ]


def measure(count, seed):
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        link = stack.enter_context(partition.Partition()) if partition.possible() else None
        address = "127.0.0.1" if link is None else partition.NEAR
        binds = ("--bind", "127.0.0.1", *([address] if link else []))
        server = stack.enter_context(store_servers.valkey(folder / "valkey", *binds))
        far = None if link is None else (FAR, link.address, link.inside)
        store = f"redis://{address}:{server.port}"
        cluster = stack.enter_context(Cluster(folder, BLOCKS, store=store, far=far))
        router = Routed(cluster)
        stack.callback(router.close)
        campaign = Campaign(cluster, router, seed)
        try:
            play(campaign, cluster, server, link, count)
        finally:
            campaign.close()
        return report(campaign, cluster)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40, help="of a window (default: %(default)s)")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args(arguments)
    if not DYNAMO.exists():
        return "Dynamo is not there: make peers ARGS=dynamo"
    if not store_servers.PROGRAMS["valkey"].exists():
        return "Valkey is not there: make stores"
    if not namespace.possible():
        return "this user may make no network namespace"
    if not namespace.INSIDE:
        return namespace.run("tests.faults_cluster", *sys.argv[1:]).returncode
    figures = measure(given.turns, given.seed)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))
    missed = misses(figures)
    sys.stdout.write(
        f"{figures['turns']} turns, {figures['wrong']} wrong tokens, {figures['late']} late, "
        f"{figures['twice to a dead machine']} twice to a dead machine, picks {figures['picks']}\n"
    )
    return "; ".join(missed) or 0


if __name__ == "__main__":
    sys.exit(main())
