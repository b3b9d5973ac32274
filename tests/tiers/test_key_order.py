"""KeyOrder against a plain model of paths, and the rules that its victims follow."""

import ast
import random
from pathlib import Path

import pytest

import kvtrie
from kvtrie.errors import ConfigError
from kvtrie.tiers.key_order import KeyOrder

SECOND = 10**9


class Clock:
    def __init__(self):
        self.now = SECOND

    def __call__(self):
        self.now += SECOND // 7
        return self.now


def made(*paths, blocks=64, **more):
    order = KeyOrder(blocks, clock=Clock(), **more)
    for path in paths:
        order.request(key(name) for name in path)
    return order


def key(name):
    return b"%-32d" % ord(name)


def names(keys):
    return None if keys is None else "".join(chr(int(one)) for one in keys)


def test_the_block_used_longest_ago_leaves_first_and_blocks_leave_after_their_children():
    order = made("abc", "de", "abc")
    assert names(order.evict(2)) == "ed"
    assert names(order.evict(3)) == "cba"
    assert len(order) == 0


def test_eviction_is_all_or_nothing_and_a_block_that_stays_keeps_those_before_it():
    order = made("abc", "de")
    assert order.evict(6) is None
    assert order.evict(3, [key("c")]) is None
    assert order.evict(0) == []
    assert names(order.evict(2, [key("c"), b"unknown"])) == "ed"
    assert order.evict(1, [key("c")]) is None
    assert names(order.evict(3)) == "cba"


def test_a_capacity_of_0_holds_nothing():
    order = made("abc", blocks=0)
    order.keep([key("a")], 80)
    order.release(key("a"))
    order.restore([(key("a"), 1, 1)])
    assert (len(order), key("a") in order) == (0, False)
    assert (order.evict(0), order.evict(1)) == ([], None)
    order.clear()


@pytest.mark.parametrize("blocks", [-1, 2**32, "three", None])
def test_a_capacity_that_cannot_be_is_named(blocks):
    with pytest.raises(ConfigError, match=r"^the capacity is .*0 to 4294967294 wanted"):
        KeyOrder(blocks)


def test_priorities_come_first_and_end():
    order = made("a", "b", "c")
    order.keep([key("a"), key("x")], 80, 60 * SECOND)
    order.keep([key("c")], 0)
    assert names(order.evict(2)) == "cb"
    order.request([key("d")])
    assert names(order.evict(1)) == "d"
    order.request([key("e")])
    order._clock.now += 60 * SECOND
    order.request([key("e")])
    assert names(order.evict(1)) == "a"


def test_a_retained_range_of_a_sequence_stays():
    order = made("abcd", "ef")
    order.keep([key("b"), key("c")], 80)
    order.keep([key("e")], 90)
    assert names(order.evict(2)) in ("df", "fd")
    assert names(order.evict(4)) == "cbae"


def test_a_released_sequence_leaves_first_until_it_is_used_again():
    order = made("ab", "cd", "ef")
    order.release(key("f"))
    order.release(key("d"))
    order.release(key("x"))
    order.request([key("c"), key("d")])
    assert names(order.evict(2)) == "fe"
    assert names(order.evict(2)) == "ba"


def test_a_key_moves_to_the_sequence_it_joins_later():
    order = made("a", "b", "cd")
    order.request(map(key, "abcd"))  # c has a child and stays
    order.request(map(key, "yz"), after=key("b"))
    assert order.evict(1, map(key, "dzy")) is None
    assert names(order.evict(4, [key("d")])) == "zyba"


def test_blocks_after_a_removed_one_stay():
    order = made("abcd", "abe")
    order.remove(key("b"))
    assert (key("b") in order, len(order)) == (False, 4)
    assert names(order.evict(1, map(key, "ced"))) == "a"
    assert order.evict(1, map(key, "ed")) is None
    order._manager.audit()


def test_ages_and_uses_are_restored():
    order = made("abc", "ab", "ab", "d")
    order._clock.now += 100 * SECOND
    keys = [key(name) for name in "dcba"]
    ages = order.ages(keys)
    again = KeyOrder(4, clock=order._clock)
    again.restore([(one, *row) for one, row in zip(keys, ages, strict=True)])
    drift = SECOND  # of the clock between the calls
    for (age, uses), (age_again, uses_again) in zip(ages, again.ages(keys), strict=True):
        assert uses == uses_again
        assert 0 <= age_again - age <= drift
    assert names(again.evict(4)) == "cdba"  # a and b were used more often


def test_keys_of_other_widths_and_forgetting_all():
    order = KeyOrder(4, width=36)
    keys = [b"x" * 36, b"short", b"x" * 35, b"long" * 20]
    order.request(keys)
    assert order.evict(4) == keys[::-1]
    order.request(keys)
    order.clear()
    assert (len(order), order.evict(1)) == (0, None)


class Paths:
    """The rules by looking at everything: a key, and the key before it."""

    def __init__(self):
        self.before = {}

    def children(self, name):
        return [other for other, last in self.before.items() if last == name]

    def request(self, path, after):
        last = after if after in self.before else None
        for name in path:
            movable = not self.children(name) and name not in self.path(last)
            if self.before.get(name) is None and movable:
                self.before.pop(name, None)
                self.before[name] = last
            last = name

    def path(self, name):
        return [] if name is None else [name, *self.path(self.before[name])]

    def leave(self, gone, count, stay):
        """Each victim was a leaf, and as many leave as may."""
        staying = {name for one in stay if one in self.before for name in self.path(one)}
        able = len(self.before.keys() - staying)
        assert (gone is None) == (able < count)
        for name in gone or ():
            assert name not in staying
            assert not self.children(name)
            del self.before[name]


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_against_plain_paths(seed):
    draw, order, paths = random.Random(seed), made(blocks=40), Paths()
    alphabet = [chr(at) for at in range(48, 108)]
    for _ in range(150):
        present, kind = list(paths.before), draw.random()
        if kind < 0.5:
            path = draw.sample(alphabet, draw.randint(1, 6))
            after = draw.choice([None, *alphabet])
            new = len(set(path) - set(present))
            if (need := len(present) + new - 40) > 0:
                gone = names(order.evict(need, map(key, path)))
                paths.leave(gone, need, path)
                if gone is None:
                    continue
            order.request(map(key, path), after=key(after) if after else None)
            paths.request(path, after)
        elif kind < 0.6 and present:
            one = draw.choice(present)
            order.remove(key(one))
            below = [name for name in present if one in paths.path(name)[1:]]
            last = {name: paths.before[name] for name in below}
            for name in (one, *below):
                del paths.before[name]
            for name in sorted(below, key=present.index):
                paths.before[name] = None if last[name] == one else last[name]
        elif kind < 0.7 and present:
            order.keep(
                list(map(key, draw.sample(present, 2 % len(present) + 1))), draw.choice([0, 80])
            )
        else:
            count, stay = draw.randint(0, 5), draw.sample(alphabet, 3)
            paths.leave(names(order.evict(count, map(key, stay))), count, stay)
        assert {names([one]) for one in order._handles} == set(paths.before)
        assert {
            names([one]): last and names([last]) for one, last in order._before.items()
        } == paths.before
        assert order._manager.stats().blocks == len(order)
    order._manager.audit()


def test_python_has_no_order_of_eviction_of_its_own():
    """No heap and no cost formula, but for the clock and the ideal policy of the simulator."""
    root = Path(kvtrie.__file__).parent
    for path in root.rglob("*.py"):
        imported = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (getattr(node, "module", None), *(one.name for one in node.names))
        }
        part = path.relative_to(root).parts[0]
        assert part == "sim" or "heapq" not in imported, path
        assert part not in ("tiers", "engines") or "math.log" not in path.read_text(), path
