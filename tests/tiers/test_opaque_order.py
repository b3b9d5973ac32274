"""OpaqueOrder against a plain list, and what its victims are."""

import random

import pytest

from kvtrie.errors import ConfigError
from kvtrie.tiers.opaque_order import OpaqueOrder

SECOND = 10**9


class Clock:
    def __init__(self):
        self.now = SECOND

    def __call__(self):
        return self.now


def made(*keys, **more):
    clock = Clock()
    order = OpaqueOrder(clock)
    for key in keys:
        clock.now += SECOND
        order.add(key, **more)
    return order, clock


def test_what_was_used_longest_ago_leaves_first_and_uses_count():
    order, clock = made("a", "b", "c")
    clock.now += SECOND
    order.use("a")
    clock.now += SECOND
    assert order.victims(2) == ["b", "c"]
    order, clock = made("often", "once")
    for _ in range(8):
        order.use("often")
    clock.now += 3 * SECOND
    assert order.victims(1) == ["once"]


def test_what_stands_deep_costs_more_and_stays_longer():
    clock = Clock()
    order = OpaqueOrder(clock)
    order.add("deep", position=200_000)
    order.add("early", position=0)
    clock.now += SECOND
    assert order.victims(1) == ["early"]


def test_a_block_leaves_before_the_one_that_it_stands_behind():
    order, _ = made()
    order.add("head")
    order.add("middle", behind="head", position=16)
    order.add("tail", behind="middle", position=32)
    assert order.victims(3) == ["tail", "middle", "head"]


def test_a_child_that_may_not_leave_does_not_keep_all_from_leaving():
    order, _ = made()
    order.add("head")
    order.add("tail", behind="head", free=False)
    assert order.victims(2) is None
    assert order.victims(1, {"head"}) is None
    assert order.victims(1) == ["head"]


def test_priorities_come_first_and_end():
    order, clock = made("old", "young", "least")
    order.keep("old", 80, 5 * SECOND)
    order.keep("least", 0)
    clock.now += SECOND
    assert order.victims(1) == ["least"]
    order.add("younger")
    assert order.victims(1) == ["young"]
    clock.now += 5 * SECOND
    order.use("younger")
    assert order.victims(1) == ["old"]


def test_a_key_is_added_once():
    order, _ = made("a")
    with pytest.raises(ConfigError, match="there already"):
        order.add("a")


class Naive:
    """The same rules by looking at everything."""

    def __init__(self, clock):
        self.clock, self.rows = clock, {}

    def children(self, rows, key):
        return [other for other, row in rows.items() if row["behind"] == key]

    def may(self, rows, key, protected):
        return rows[key]["free"] and key not in protected

    def worth(self, row):
        return row["cost"] * min(row["uses"], 64) / max(self.clock.now - row["used"], 1)

    def check(self, got, count, protected):
        """Victims are right one by one: leaves, worth at most a quarter above the least."""
        rows = dict(self.rows)
        able = sum(self.may(rows, key, protected) for key in rows)
        if got is None:
            assert able < count
            return
        for key in got:
            leaves = [
                other
                for other in rows
                if self.may(rows, other, protected) and not self.children(rows, other)
            ]
            assert self.may(rows, key, protected)
            if leaves:
                assert key in leaves
                assert rows[key]["priority"] == min(rows[one]["priority"] for one in leaves)
                mine = [o for o in leaves if rows[o]["priority"] == rows[key]["priority"]]
                least = min(self.worth(rows[other]) for other in mine)
                assert self.worth(rows[key]) <= 1.26 * least
            del rows[key]
            for row in rows.values():
                row["behind"] = None if row["behind"] == key else row["behind"]


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_against_a_plain_list(seed):
    draw, clock = random.Random(seed), Clock()
    order, naive, next_key = OpaqueOrder(clock), Naive(clock), 0
    for _ in range(400):
        clock.now += draw.randint(1, 5) * SECOND // 7
        keys, what = list(naive.rows), draw.random()
        if what < 0.4 or not keys:
            behind = draw.choice([*keys, None]) if keys else None
            position = draw.randrange(0, 100_000, 16)
            free = draw.random() < 0.8
            order.add(next_key, position=position, behind=behind, free=free)
            naive.rows[next_key] = {
                "cost": 1 + position / 24_576, "uses": 1, "used": clock.now, "behind": behind,
                "free": free, "priority": 35,
            }  # fmt: skip
            next_key += 1
        elif what < 0.6:
            key = draw.choice(keys)
            order.use(key)
            naive.rows[key] |= {"used": clock.now, "uses": naive.rows[key]["uses"] + 1}
        elif what < 0.7:
            key, free = draw.choice(keys), draw.random() < 0.7
            order.hold(key, free=free)
            naive.rows[key]["free"] = free
        elif what < 0.75:
            key, priority = draw.choice(keys), draw.choice([0, 35, 80])
            order.keep(key, priority)
            naive.rows[key]["priority"] = priority
        else:
            count = draw.randint(0, 5)
            protected = set(draw.sample(keys, min(len(keys), 2)))
            got = order.victims(count, protected)
            naive.check(got, count, protected)
            for key in got or ():
                del naive.rows[key]
                for row in naive.rows.values():
                    row["behind"] = None if row["behind"] == key else row["behind"]
        assert len(order) == len(naive.rows)
    everything = order.victims(sum(row["free"] for row in naive.rows.values()))
    assert everything is not None
