"""A manager whose blocks are published, under random work, and what it has by medium.

Invariant: `has` reads the manager's copies alone, never its events.
"""

from __future__ import annotations

from contextlib import suppress

from kvtrie import BlockManager, ModelShape, Scope, Tier
from kvtrie.errors import ConfigError, NoSpaceError

SIZE = 4
LAYERS = 4
WORDS = 7
MOST_LEASES = 3
MODEL = ModelShape(layers=LAYERS, kv_heads=2, head_dim=8, fingerprint="published")
PRIVATE = Scope(tenant=b"other"), Scope(extra=((5, b"image"),))
ADAPTER = Scope(lora="french")
ROOMS = {"gpu": 18, "host": 30, "disk": 60}


def manager_of(*, rooms=None, model=MODEL, **settings):
    """A manager with a tier of each kind that has room."""
    rooms = rooms or ROOMS
    last = [*rooms][-1]
    tiers = [
        Tier(kind, blocks=room, owner="none", write="back" if kind == last else "through")
        for kind, room in rooms.items()
    ]
    settings = {"events": 100_000, "events_of": "residency", "block_tokens": SIZE} | settings
    return BlockManager(model, tiers, **settings)


def prompts(random, count=24, most=6):
    """Prompts of which many begin alike."""
    found = [list(random.integers(0, WORDS, SIZE * 2))]
    while len(found) < count:
        base = found[random.integers(len(found))]
        kept = int(random.integers(len(base) // SIZE + 1)) * SIZE
        more = int(random.integers(1, most - min(most - 1, kept // SIZE) + 1)) * SIZE
        found.append([*base[:kept], *random.integers(0, WORDS, more)])
    return [[*map(int, prompt)] for prompt in found]


class PublishedWorld:
    """Random operations on a manager.

    Args:
        manager: as `manager_of` makes it.
        random: numpy's generator.
        prompts: the prompts of requests.
    """

    def __init__(self, manager, random, prompts):
        self.manager, self.random, self.prompts = manager, random, prompts
        self.now, self._leases, self._moves = 0, [], []

    def step(self):
        """Do one operation."""
        self.now += int(self.random.integers(1, 5))
        draw = self.random.random()
        if draw < 0.6:
            self._request()
        elif draw < 0.7:
            self._mark()
        elif draw < 0.8:
            self._evict()
        elif draw < 0.985:
            self.carry_out(int(self.random.choice([1, 1 << 30])))
        else:
            self.end_requests()
            self.manager.reset()
            self.now = 0

    def end_requests(self):
        """End all requests and moves."""
        while self._leases:
            self._release(0)
        while self.carry_out():
            pass

    def carry_out(self, most=1 << 30):
        """End the first of the moves that are handed out; return how many ended."""
        self._moves += map(int, self.manager.moves().id)
        ended = self._moves[:most]
        self._moves = self._moves[len(ended) :]
        if ended:
            self.manager.complete(ended, now=self.now)
        return len(ended)

    def has(self, tokens, scope=None):
        """Tokens of a prompt by medium, each going on where the medium before it ends."""
        found = self.manager.lookup(tokens, now=self.now, keep=0, scope=scope)
        tiers_of = [{each.tier for each in block.copies if _whole(each)} for block in found.blocks]
        ends, at = [], 0
        for tier in range(len(self.manager.tiers)):
            while at < len(tiers_of) and tier in tiers_of[at]:
                at += 1
            ends.append(at * SIZE)
        return tuple(ends)

    def _request(self):
        if len(self._leases) == MOST_LEASES:
            self._release(int(self.random.integers(MOST_LEASES)))
        scope = (None, None, None, None, ADAPTER, *PRIVATE)[int(self.random.integers(7))]
        tokens = self.prompts[int(self.random.integers(len(self.prompts)))]
        try:
            lease = self.manager.acquire(tokens, now=self.now, scope=scope, keep=0)
        except NoSpaceError:
            self.carry_out()
            return
        self._leases.append((lease, tokens))

    def _release(self, at):
        lease, tokens = self._leases.pop(at)
        while len(lease.after) and self.carry_out():
            pass
        if self.random.random() < 0.9:
            lease.commit(tokens[lease.matched :], now=self.now)
        lease.release(now=self.now)

    def _mark(self):
        tokens = self.prompts[int(self.random.integers(len(self.prompts)))]
        tier = int(self.random.integers(1, len(self.manager.tiers)))
        present = self.random.random() < 0.7
        with suppress(ConfigError, NoSpaceError):
            self.manager.mark(tokens, tier, present=present, now=self.now)

    def _evict(self):
        with suppress(NoSpaceError):
            self.manager.evict(int(self.random.integers(1, 4)), 0, now=self.now)


def _whole(copy):
    return (copy.layer_lo, copy.layer_hi, copy.leaving) == (0, LAYERS, False)
