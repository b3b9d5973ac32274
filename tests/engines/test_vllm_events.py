"""The vLLM connector exports KV events of stored and removed blocks."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.engines.vllm_engine import LAYERS, SIZE, Engine, named, play

from kvtrie.engines.vllm.changes import Extra
from kvtrie.engines.vllm.events import PublishedBlocks


def event(number, kind, tier, layers, key=b"k", parent=b"root", block=1, group=0):
    lo, hi = layers
    return SimpleNamespace(
        number=number, kind=kind, tier=tier, layer_lo=lo, layer_hi=hi, key=key, parent=parent,
        tokens=[1, 2], block=block, group=group,
    )  # fmt: skip


def published(changes):
    return [(one.stored, one.tier, one.hash, one.parent) for one in changes]


def request_of(*hashes):
    return SimpleNamespace(block_hashes=list(hashes))


def test_a_block_is_published_once_it_is_whole_and_taken_back_with_its_first_layer():
    announced = PublishedBlocks([2])
    announced.learn(request_of(b"K", b"L"), [1, 2], 0, 2)
    rows = [
        event(0, "stored", 0, (0, 2)),
        event(1, "stored", 1, (0, 1)),
        event(2, "stored", 1, (1, 2)),
        event(3, "stored", 1, (0, 2), b"l", b"k", 2),
        event(4, "removed", 1, (0, 1), b"l", b"k", 2),
        event(5, "removed", 1, (1, 2), b"l", b"k", 2),
        event(6, "removed", 0, (0, 2)),
    ]
    assert published(announced.take(rows)) == [
        (True, 1, b"K", None),
        (True, 1, b"L", b"K"),
        (False, 1, b"L", None),
    ]
    assert announced.missed == announced.unknown == 0
    assert published(announced.clear()) == [(False, 1, b"K", None)]
    list(announced.take([event(9, "stored", 1, (0, 1))]))
    assert announced.missed == 2


def test_a_block_without_a_hash_and_its_children_wait_for_it():
    announced = PublishedBlocks([1])
    rows = [
        event(0, "stored", 2, (0, 1)),
        event(1, "stored", 2, (0, 1), b"l", b"k", 2),
        event(2, "stored", 2, (0, 1), b"m", b"l", 3),
        event(3, "removed", 2, (0, 1), b"m", b"l", 3),
    ]
    assert published(announced.take(rows)) == []
    assert announced.unknown == 3
    announced.learn(request_of(b"K", b"L"), [2], 1, 2)
    assert published(announced.take([])) == []
    announced.learn(request_of(b"K", b"L"), [1], 0, 2)
    assert published(announced.take([])) == [(True, 2, b"K", None), (True, 2, b"L", b"K")]
    assert not announced.nameless


def test_a_block_with_an_image_that_is_found_at_start_is_not_named_by_its_tokens():
    naming = SimpleNamespace(hash=lambda _parent, _tokens: b"K")
    announced = PublishedBlocks([1], naming, b"root", {b"l"})
    rows = [
        event(0, "stored", 2, (0, 1)),
        event(1, "stored", 2, (0, 1), b"l", b"k", 2),
        event(2, "stored", 2, (0, 1), b"m", b"l", 3),
    ]
    assert published(announced.take(rows)) == [(True, 2, b"K", None)]
    assert announced.unknown == 2


def test_a_child_is_published_after_its_parent_on_any_tier():
    announced = PublishedBlocks([1])
    announced.learn(request_of(b"K", b"L"), [1, 2], 0, 2)
    rows = [
        event(0, "stored", 1, (0, 1), b"l", b"k", 2),
        event(1, "stored", 2, (0, 1)),
        event(2, "stored", 1, (0, 1)),
        event(3, "removed", 2, (0, 1)),
    ]
    assert published(announced.take(rows)) == [
        (True, 2, b"K", None),
        (True, 1, b"L", b"K"),
        (True, 1, b"K", None),
        (False, 2, b"K", None),
    ]


def test_groups_of_a_block_are_published_one_by_one_after_its_parent_of_the_first_group():
    announced = PublishedBlocks([2, 1])
    announced.learn(request_of(b"K", b"L"), [1, 2], 0, 2)
    rows = [
        event(0, "stored", 1, (0, 1), b"l", b"k", 2, group=1),
        event(1, "stored", 1, (0, 1), group=1),
        event(2, "stored", 1, (0, 1)),
        event(3, "stored", 1, (1, 2)),
        event(4, "stored", 1, (0, 2), b"l", b"k", 2),
        event(5, "removed", 1, (0, 1), b"l", b"k", 2, group=1),
        event(6, "removed", 1, (0, 2)),
    ]
    assert [one[:5] for one in announced.take(rows)] == [
        (True, 1, 1, b"K", None),
        (True, 1, 0, b"K", None),
        (True, 1, 1, b"L", b"K"),
        (True, 1, 0, b"L", b"K"),
        (False, 1, 1, b"L", None),
        (False, 1, 0, b"K", None),
    ]


def test_blocks_are_published_again_after_their_parents_and_stay_known():
    announced = PublishedBlocks([1, 1])
    announced.learn(request_of(b"K", b"L"), [1, 2], 0, 2)
    rows = [
        event(0, "stored", 2, (0, 1)),
        event(1, "stored", 1, (0, 1), b"l", b"k", 2),
        event(2, "stored", 1, (0, 1), b"l", b"k", 2, group=1),
        event(3, "stored", 1, (0, 1)),
        event(4, "removed", 2, (0, 1)),  # so that the child was published before its parent
    ]
    list(announced.take(rows))
    again = list(announced.again())
    assert {one[:4] for one in again[:3]} == {
        (False, 1, 0, b"K"),
        (False, 1, 0, b"L"),
        (False, 1, 1, b"L"),
    }
    assert [(*one[:5], one.tokens) for one in again[3:]] == [
        (True, 1, 0, b"K", None, [1, 2]),
        (True, 1, 1, b"L", b"K", [1, 2]),
        (True, 1, 0, b"L", b"K", [1, 2]),
    ]
    left = [event(5, "removed", 1, (0, 1), b"l", b"k", 2)]
    assert [one[:4] for one in announced.take(left)] == [(False, 1, 0, b"L")]


def test_only_blocks_of_the_current_weights_are_published():
    announced = PublishedBlocks([1])
    announced.learn(request_of(b"K", b"L"), [1, 2], 0, 2)
    rows = [
        event(0, "stored", 1, (0, 1)),
        event(1, "stored", 1, (0, 1), b"l", b"k", 2),
    ]
    first = [(True, 1, 0, b"K"), (True, 1, 0, b"L")]
    assert [one[:4] for one in announced.take(rows)] == first
    gone = [(False, 1, 0, b"K"), (False, 1, 0, b"L")]
    assert [one[:4] for one in announced.change_weights("new")] == gone
    # The same tokens by the new weights, whose copies have been under way.
    announced.learn(request_of(b"K"), [3], 0, 2, weights="new")
    rows = [event(2, "stored", 1, (0, 1), b"m", b"q", 3)]
    assert [one[:4] for one in announced.take(rows)] == first[:1]
    assert [
        one[:4] for one in announced.take([event(3, "removed", 1, (0, 1), b"l", b"k", 2)])
    ] == []
    assert [one[:4] for one in announced.change_weights("")] == [gone[0], first[0]]
    assert [one[:4] for one in announced.change_weights("new")] == [gone[0], first[0]]
    assert [one[:4] for one in announced.take([event(4, "removed", 1, (0, 1), b"m", b"q", 3)])] == [
        gone[0]
    ]
    assert [one[:4] for one in announced.change_weights("")] == first[:1]


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kinds", ["", "w", "ws"])
def test_replayed_events_are_the_blocks_below_the_gpu_with_vllms_hashes(tmp_path, seed, kinds):
    class Naming:
        def hash(self, parent, tokens):
            chain = [*self.chains.get(parent, ()), *tokens]
            name = named(chain)[-1]
            self.chains[name] = chain
            return name

        def facts(self, *_):
            return Extra()

    for again in range(2):
        naming = Naming()
        naming.chains = {None: []}
        more = {"kinds": kinds, "host": 16 if kinds else 6}
        engine = Engine(tmp_path, 1, 1, seed, events=True, naming=naming, **more)
        seen = Seen(engine.scheduler)
        changes = engine.scheduler.changes()
        assert (len(changes) > 0) == (again > 0)
        play(engine, 14, seed)
        changes += engine.scheduler.changes()
        groups = range(1 + len(kinds))
        resident = {(tier, group): set() for tier in (1, 2) for group in groups}
        wanted = {name for each in engine.seen for name in named(each.all_token_ids)}
        for change in changes:
            names = resident[change.tier, change.group]
            if change.stored:
                assert change.hash not in names
                assert change.parent is None or change.parent in resident[1, 0] | resident[2, 0]
                assert len(change.tokens) == SIZE
                assert again or change.hash in wanted
                names.add(change.hash)
            else:
                names.remove(change.hash)
        shown = (seen.whole(1, 0) | seen.whole(2, 0)) & seen.useful(len(kinds))
        for (tier, group), hashes in resident.items():
            whole = seen.whole(tier, group)
            assert len(whole) == whole_blocks(engine, tier, group)
            # A window or state is published after the block before it.
            after = {key for key in whole if seen.parents[key] in {seen.root, *shown}}
            assert len(hashes) == len(after if group else whole & shown)
            assert hashes or tier < 2
        assert engine.scheduler.cache.published.unknown == 0
        engine.close()
    assert engine.scheduler.reset()
    gone = {change[1:4] for change in engine.scheduler.changes() if not change.stored}
    assert {(2, group, name) for group in groups for name in resident[2, group]} <= gone


class Seen:
    """What is where by the manager's events, and how far requests can go with it."""

    def __init__(self, scheduler):
        self.manager, self.layers, self.parents = scheduler.manager, {}, {}
        self.root = scheduler.cache.published._root
        take = scheduler.cache.published.take
        scheduler.cache.published.take = lambda events: take(self.note(events))

    def note(self, events):
        for each in events:
            place = self.layers.setdefault((each.tier, each.group, each.key), set())
            named = set(range(each.layer_lo, each.layer_hi))
            place |= named
            place -= named if each.kind == "removed" else set()
            self.parents[each.key] = each.parent
        return events

    def whole(self, tier, group):
        count = 1 if group else LAYERS
        return {
            key
            for (at, of, key), layers in self.layers.items()
            if (at, of) == (tier, group) and len(layers) == count
        }

    def useful(self, others):
        """Keys of blocks at or before a border for which each other group has what it needs."""
        anywhere = {
            group: self.whole(1, group) | self.whole(2, group) for group in range(others + 1)
        }
        useful = set()
        for key in anywhere[0]:
            path = [key]
            while (parent := self.parents[path[0]]) in self.parents:
                path.insert(0, parent)
            needs = self.manager.resume_needs(len(path)) if others else []
            wanted = [(group, span) for group, both in enumerate(needs, 1) for span in both]
            if all(set(path[lo:hi]) <= anywhere[group] for group, (lo, hi) in wanted):
                useful |= set(path)
        return useful


def whole_blocks(engine, tier, group):
    """Blocks of a group that are whole on a tier."""
    if group:
        slots = engine.scheduler.manager.stats().tiers[("host", "disk")[tier - 1]].groups[group]
        return slots.held + slots.released
    index = engine.scheduler.manager.index(tier, now=engine.scheduler.cache.clock())
    whole = index.layer_hi - index.layer_lo == LAYERS
    return np.count_nonzero(whole & (index.group == 0))
