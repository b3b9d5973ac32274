"""Agreement: what managers have, and what readers of their events say, prompt by prompt.

Three machines work at random. Every seventh batch is lost on its way, publishers and their engines
restart on the same ports, readers are killed and start late. After each round the managers' copies,
a reader of vLLM's form and Dynamo's indexer answer the same prompts, per medium.

    python -m tests.cluster.agreement --rounds 20

prints the table. Invariant: a reader's answer is compared with the copies at the batch that
it read last, so one that knows more is one that is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zmq
from tests import namespace
from tests.cluster.dynamo_services import PYTHON, Dynamo
from tests.cluster.published_world import SIZE, WORDS, PublishedWorld, manager_of, prompts
from tests.event_readers import Subscriber, VllmReader

from kvtrie.cluster import DynamoIndex, Held, Publisher

MACHINES = 3
STEPS = 12  # of each machine in a round
LOST = 7
ASKS = 400
READER, INDEXER = "reader", "indexer"
ANY = "tcp://127.0.0.1:0"


class LossySubscriber(Subscriber):
    """Loses every seventh message of the stream."""

    count = 0

    def _live(self, topic, number, payload):
        self.count += 1
        if self.count % LOST:
            super()._live(topic, number, payload)


class Relay:
    """Forwards a publisher's stream under an address that stays, and loses every seventh batch."""

    def __init__(self, context, endpoint):
        self._in, self._out, self._count = context.socket(zmq.SUB), context.socket(zmq.PUB), 0
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.connect(endpoint)
        self._in.subscribe(b"")
        self._out.bind(ANY)
        self.endpoint = self._out.last_endpoint.decode()

    def pump(self):
        while self._in.poll(0):
            message = self._in.recv_multipart()
            self._count += 1
            if self._count % LOST:
                self._out.send_multipart(message)


class Machine:
    """A manager under work, its publisher, and a reader of its events."""

    def __init__(self, seed, folder, context):
        self.random = np.random.default_rng(seed)
        self.prompts = prompts(self.random)
        self.endpoint, self.replay = ANY, ANY
        self.file = folder / f"number{seed}"
        self.reader = self.relay = None
        self._beats = 0
        self.work(manager_of())
        self.relay = Relay(context, self.endpoint)
        self.read()

    def work(self, manager):
        """Work on a manager, and publish it on the same ports as before."""
        self.world = PublishedWorld(manager, self.random, self.prompts)
        form = ["map", "array"][int(self.random.integers(2))]
        self.publisher = Publisher(
            manager, self.endpoint, self.replay, form=form, ring=9, number_file=self.file
        )
        self.endpoint, self.replay = self.publisher.endpoint, self.publisher.replay

    def restart(self, *, engine):
        """Restart the publisher, or the engine with it."""
        self.publisher.close()
        if engine:
            self.work(manager_of())
        else:
            now, world = self.world.now, self.world
            self.work(world.manager)
            world.now, self.world = now, world

    def read(self):
        """Kill the reader, and start another one, which is late."""
        if self.reader is not None:
            self.reader.close()
        self.reader = LossySubscriber(VllmReader(), self.endpoint, self.replay)

    def step(self):
        self.world.step()
        self.pump()

    def beat(self):
        """Publish one more batch, by which readers notice what they lack."""
        self._beats += 1
        self.world.now += 1
        block, present = [WORDS + 1] * SIZE, self._beats % 2 == 1
        self.world.manager.mark(block, "host", present=present, now=self.world.now)
        self.pump()

    def pump(self):
        self.publisher.pump()
        self.reader.pump(0)
        if self.relay is not None:
            self.relay.pump()

    def catch_up(self):
        """Let the reader read all batches."""
        while self.reader.last != self.publisher.counts.last:
            self.beat()
            self.reader.pump(5)

    def close(self):
        self.reader.close()
        self.publisher.close()


class Campaign:
    """Rounds of work, and what each reader answered."""

    def __init__(self, seed, folder, *, indexer):
        self.context = zmq.Context()
        seeds = range(seed * MACHINES, (seed + 1) * MACHINES)
        self.machines = [Machine(each, folder, self.context) for each in seeds]
        self.table = {who: Counter() for who in (READER, INDEXER)[: 1 + indexer]}
        self.dynamo = Dynamo("indexer") if indexer else None
        if indexer:
            self._register()

    def close(self):
        for machine in self.machines:
            machine.close()
        if self.dynamo is not None:
            self.index.close()
            self.dynamo.close()
        self.context.destroy(linger=0)

    def round(self, number):
        """Work, have a fault, and compare."""
        for _ in range(STEPS):
            for machine in self.machines:
                machine.step()
        machine = self.machines[number % MACHINES]
        fault = number % 5
        if fault in {1, 2}:
            machine.restart(engine=fault == 2)
        elif fault == 3:
            machine.read()
        elif fault == 4 and self.dynamo is not None and number % 10 == 4:
            self.index.close()
            self.dynamo.close()
            self.dynamo.start()
            self._register()
        self._compare()

    def _register(self):
        self.index = DynamoIndex(self.dynamo.url, block_tokens=SIZE)
        for at, machine in enumerate(self.machines):
            self.index.add(at, events=machine.relay.endpoint, replay=machine.replay)

    def _compare(self):
        for at, machine in enumerate(self.machines):
            machine.catch_up()
            reader = machine.reader.reader
            for prompt in machine.prompts:
                self._count(READER, machine.world.has(prompt), reader.continued(prompt))
            if self.dynamo is not None:
                for has, answer in self._quiet_answers(at, machine):
                    self._count(INDEXER, has, answer)

    def _quiet_answers(self, at, machine):
        """Return pairs of the copies of a prompt and the indexer's answer, once it has read all.

        The indexer waits for ever for a history that an engine was asked for as it ended: the
        machine is registered again then.
        """
        answers = []
        for ask in range(ASKS):
            machine.beat()  # it may evict another block
            answers = [(machine.world.has(each), self._ask(at, each)) for each in machine.prompts]
            if all(has == answer for has, answer in answers):
                break
            if ask == ASKS // 2:
                self.index.remove(at)
                self.index.add(at, events=machine.relay.endpoint, replay=machine.replay)
                self.table[INDEXER]["again"] += 1
        return answers

    def _ask(self, machine, prompt):
        held = self.index.match(prompt, deadline_s=5).get(machine, Held(0, 0, 0))
        return tuple(SIZE * blocks for blocks in (held.gpu, held.host, held.disk))

    def _count(self, who, has, answer):
        row = self.table[who]
        row["asked"] += 1
        row["found"] += any(has)
        row["equal"] += answer == has
        row["more"] += any(said > true for said, true in zip(answer, has, strict=True))
        row["less"] += any(said < true for said, true in zip(answer, has, strict=True))


def play(rounds, seed, *, indexer):
    """Return the table: answers that were asked, found, equal, less and more.

    `again` counts machines that had to be registered again.
    """
    with TemporaryDirectory() as folder:
        campaign = Campaign(seed, Path(folder), indexer=indexer)
        try:
            for number in range(rounds):
                campaign.round(number)
            for machine in campaign.machines:
                machine.world.manager.audit()
            return {who: dict(row) for who, row in campaign.table.items()}
        finally:
            campaign.close()


def main():
    """Play in a namespace, and print the table; 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=140)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    table = play(given.rounds, given.seed, indexer=PYTHON.exists())
    if given.json:
        sys.stdout.write(json.dumps(table) + "\n")
    else:
        columns = ("asked", "found", "equal", "less", "more", "again")
        lines = [f"{'':10}" + "".join(f"{column:>8}" for column in columns)]
        for who, row in table.items():
            lines.append(f"{who:10}" + "".join(f"{row.get(column, 0):8}" for column in columns))
        sys.stdout.write("\n".join(lines) + "\n")
    return int(any(row["asked"] != row["equal"] for row in table.values()))


if __name__ == "__main__":
    sys.exit(namespace.run("tests.cluster.agreement", *sys.argv[1:]).returncode)
