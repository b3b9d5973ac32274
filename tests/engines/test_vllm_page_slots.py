"""Slots of several blocks of vLLM's: names, and how long they last."""

import random

from kvtrie.engines.vllm.model import ServedGroup
from kvtrie.engines.vllm.page_slots import PageSlots

GROUPS = [ServedGroup(0, ("a",)), ServedGroup(1, ("b",), pages=3)]


def test_blocks_of_a_group_with_long_blocks_are_its_slots():
    slots = PageSlots(GROUPS, 20)
    assert (slots.wide(0), slots.wide(1)) == (1, 3)
    assert slots.name(0, [4, 0, 9]) == [4, 0, 9]
    state = PageSlots([ServedGroup(0, ("a",), state=True, pages=3)], 20)
    assert state.name(0, [0, 7]) == [0, 7]


def test_slots_with_dropped_pages_are_named_only_where_a_load_fills_them():
    slots = PageSlots(GROUPS, 20)
    pages = [0, 0, 4, 5, 6, 7, 8, 9, 0]
    (first, whole, last) = slots.name(1, pages)
    assert (first, last) == (0, 0)
    assert whole > 0
    assert slots.name(1, pages, range(1)) == [2, whole, 0]


def test_a_slot_has_one_set_of_pages_while_any_lease_names_it():
    """Against a naive model: each live list of pages has one slot, and no slot has two."""
    draw, slots = random.Random(0), PageSlots(GROUPS, 12)
    live: list[tuple[tuple[int, ...], int]] = []
    for _ in range(2000):
        if live and draw.random() < 0.5:
            _, slot = live.pop(draw.randrange(len(live)))
            slots.end(1, [slot])
            continue
        pages = tuple(draw.sample(range(1, 5), 3))
        (slot,) = slots.name(1, pages)
        known = dict(live)
        if pages in known:
            assert slot == known[pages]
        elif len(known) == 11:
            assert slot == 0
        else:
            assert slot not in [0, *known.values()]
        live += [(pages, slot)] * (slot > 0)
