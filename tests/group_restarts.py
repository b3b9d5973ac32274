"""Groups of layers in files that outlive the process: what the next one finds is what they have.

The twin asks attention itself which blocks a border needs, and compares the bytes of the files.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

from group_world import MODELS, SIZE, World, prompt

KILLED = """
import json
import sys
from group_world import MODELS, World, prompt

with World(MODELS[sys.argv[1]], **json.loads(sys.argv[2])) as world:
    for seed in range(1000):
        world.serve(prompt(seed % 7, 5 + seed // 7), [])
        world.executor.flush()
        print(seed, flush=True)
"""


def sees(group, query, past):
    """Whether a query attends to a past token in a group of layers with KV."""
    if group.kind == "sliding":
        return query - past < group.window or past < group.sinks
    return group.kind == "full" or query // group.window == past // group.window


def naive(world, found, tokens):
    """The longest border at which each group has all that the next token needs, by its bytes."""
    best = 0
    for border in range(SIZE, len(tokens) // SIZE * SIZE + 1, SIZE):
        needed = {
            (number, past // SIZE)
            for number, group in enumerate(world.model.groups)
            for past in range(border)
            if (past == border - 1 if group.state_bytes else sees(group, border, past))
        }
        if all(
            world.bytes_of(number, tokens, place).numpy().tobytes() in found[number]
            for number, place in needed
        ):
            best = border
    return best


def compare(world, found, sessions):
    """Compare what each session would find with what the files have; return the tokens found."""
    matched = [world.manager.lookup([*one, 99], now=world.tick()).tokens for one in sessions]
    assert matched == [naive(world, found, one) for one in sessions]
    for tokens in sessions:
        world.serve([*tokens, 99], [])
    return sum(matched)


def kill(name, kills, contents, rooms):
    """Kill engines at work, and look at what the next one finds after each.

    Args:
        name: of `MODELS`.
        kills: how many.
        contents: the blocks in the files of a world, by group, read before it restores them.
        rooms: of the worlds, with the place of their files.
    """
    draw = random.Random(name)
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, name, json.dumps(rooms)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            for _ in range(draw.randrange(5, 12)):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)  # in the middle of the next one
        with World(MODELS[name], **rooms) as world:
            found = contents(world)
            world.executor.restore()
            world.manager.audit()
            assert compare(world, found, [prompt(seed, 8) for seed in range(7)]) > 0
            world.executor.drain()
