"""Runs with a shared store are those of a second simulation, written again in the plainest way."""

import random
from contextlib import suppress

import naive_remote
import pytest

from kvtrie import Lane, ModelShape, Tier
from kvtrie._kvtrie import Simulation

BLOCKS = 4
SHAPE = ModelShape(4, 1, 64, "float16")
FAST = 16_384_000_000


def drawn(seed):
    """A world, and requests for it.

    In a quiet one machines lose blocks, and no copy is under way when a request comes to them. In
    the others machines keep all, and copies of all machines wait for each other.
    """
    dice, quiet = random.Random(seed), seed % 2 == 0
    machines = dice.randint(2, 4)
    world = {
        "machines": machines,
        "gpu": BLOCKS if quiet else 400,
        "host": dice.randint(2 * BLOCKS, 3 * BLOCKS) if quiet else 400,
        "room": dice.randint(8, 24) if quiet else dice.randint(6, 60),
        "speed": dice.choice((50_000_000, 300_000_000)),
        "latency": dice.choice((0, 777, 50_001)),
        "shares": None if quiet else dice.choice((None, "nic")),
        "lookup": dice.choice(("all", "all", "all", "local")),
    }
    now, requests, chats = 0, [], [[] for _ in range(6)]
    for _ in range(8 * machines if quiet else 60):
        # The next request of the same machine comes after all copies of this one.
        now += dice.randint(4_000_000, 6_000_000) if quiet else dice.randrange(1, 1_000_000, 7)
        chat = dice.choice(chats)
        del chat[dice.randint(0, len(chat)) :]
        chat += [dice.randrange(3) for _ in range(BLOCKS - len(chat))]
        requests.append((now, list(chat)))
    return world, requests


def simulated(world, requests):
    """Time of the first token and tokens found by tier of each request, and evictions."""

    def lanes(kind, *figures):
        return {way: Lane(f"{kind} {way}", *figures) for way in ("read", "store")}

    slow = lanes("remote", world["speed"], world["latency"], world["shares"])
    # Writes ahead of need are a matter of the manager.
    more = {"owner": "none", "write": "through", "free_low": 1e-9}
    tiers = [
        Tier("gpu", blocks=world["gpu"], **more),
        Tier("host", blocks=world["host"], **more, **lanes("host", FAST)),
        Tier("remote", blocks=world["room"], owner="none", policy="lru", **slow),
    ]
    simulation = Simulation(
        SHAPE,
        tiers,
        price=(naive_remote.NS_PER_TOKEN << 32, 0),
        machines=world["machines"],
        policy="lru",
        remote=world["lookup"],
    )
    rows = [
        (at, [16 * block + token for block in prompt for token in range(16)], 64, 1, None)
        for at, prompt in requests
    ]
    lines = []
    simulation.run(rows, lambda row: lines.append({"first": row[3], "hits": tuple(row[5])}))
    return lines, simulation.tiers()[-1][-1]


def naive(world, requests):
    """The same by the second simulation."""
    queue = [0]

    def slow():
        figures = world["speed"], world["latency"]
        return naive_remote.Lane(*figures, *([queue] if world["shares"] else []))

    def fast():
        return naive_remote.Lane(FAST, 0)

    store = naive_remote.Store(world["room"], world["latency"], world["lookup"])
    machines = [
        naive_remote.Machine(at, world["gpu"], world["host"], fast(), fast(), slow(), slow())
        for at in range(world["machines"])
    ]
    return naive_remote.Simulation(machines, store).play(requests), store.evicted


def modelled(seeds, count):
    """The first seeds whose worlds the second simulation can play."""
    found = []
    for seed in seeds:
        with suppress(NotImplementedError):
            naive(*drawn(seed))
            found.append(seed)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} worlds, {count} wanted")


@pytest.mark.parametrize("seed", [*modelled(range(0, 100, 2), 10), *range(1, 21, 2)])
def test_a_run_is_that_of_the_naive_simulation(seed):
    world, requests = drawn(seed)
    lines, evicted = naive(world, requests)
    found, left = simulated(world, requests)
    for number, (one, other) in enumerate(zip(found, lines, strict=True)):
        assert one == other, (number, world)
    assert left == evicted
