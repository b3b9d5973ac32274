"""Borders: blocks that a request can go on after, compared with a search of all blocks."""

import random

import pytest

from kvtrie.engines.vllm.borders import Borders

NONE = (0, 0)


def window(blocks):
    return lambda border: (NONE, (max(0, border - blocks), border))


def chunk(blocks):
    return lambda border: (NONE, (border - border % blocks, border))


def sinks(blocks, after):
    return lambda border: (
        (0, min(border, blocks)),
        (max(min(border, blocks), border - after), border),
    )


MODELS = {
    "state": [window(1)],
    "window": [window(3)],
    "window and state": [window(2), window(1)],
    "chunk": [chunk(3)],
    "sinks": [sinks(1, 2)],
}


def needs(groups):
    return lambda border: [group(border) for group in groups]


def key(name):
    return name.encode()


def note(borders, name, group, *, resident=True, tier=1):
    """A change of the block that ends a path as "abc"."""
    place = tier, group, key(name)
    return borders.change(place, key(name[:-1]), resident=resident, first=len(name) == 1)


def test_a_state_covers_the_blocks_before_it():
    borders = Borders(needs([window(1)]))
    for name in ("a", "ab", "abc"):
        assert note(borders, name, 0) == []
    assert note(borders, "ab", 1) == [b"a", b"ab"]
    assert [borders.is_covered(key(name)) for name in ("a", "ab", "abc")] == [True, True, False]
    assert note(borders, "ab", 1, tier=2) == []
    assert note(borders, "ab", 1, resident=False) == []
    assert note(borders, "ab", 1, tier=2, resident=False) == [b"a", b"ab"]
    assert not borders.is_covered(b"a")


def test_a_window_covers_once_all_of_it_is_there():
    borders = Borders(needs([window(2)]))
    for name in ("a", "ab", "abc", "abx"):
        note(borders, name, 0)
    assert note(borders, "abc", 1) == []
    assert note(borders, "ab", 1) == [b"a", b"ab", b"abc"]
    assert note(borders, "ab", 1, resident=False) == [b"a", b"ab", b"abc"]


def test_a_border_wants_the_first_group_too():
    borders = Borders(needs([window(1)]))
    note(borders, "a", 0)
    assert note(borders, "ab", 1) == []
    assert note(borders, "ab", 0) == [b"a", b"ab"]
    assert note(borders, "ab", 0, resident=False) == [b"a", b"ab"]


def test_blocks_that_come_before_their_parents_count_once_those_are_known():
    borders = Borders(needs([window(1)]))
    note(borders, "abc", 1)
    assert note(borders, "abc", 0) == []
    assert note(borders, "ab", 0) == []
    assert note(borders, "a", 0) == [b"a", b"ab", b"abc"]


def test_a_block_on_the_gpu_alone_says_where_its_children_are():
    borders = Borders(needs([window(1)]))
    note(borders, "ab", 1)
    note(borders, "ab", 0)
    assert note(borders, "a", 0, tier=0, resident=False) == [b"a", b"ab"]


def test_a_first_block_may_be_known_as_one_later():
    borders = Borders(needs([window(1)]))
    borders.change((1, 0, b"a"), b"scope", resident=True, first=False)
    assert borders.change((1, 1, b"a"), b"scope", resident=True, first=False) == []
    assert borders.begin(b"a") == [b"a"]
    assert borders.begin(b"a") == borders.begin(b"unknown") == []


@pytest.mark.grid
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_cover_what_a_search_finds(name, seed):
    groups, draw = MODELS[name], random.Random(seed)
    borders, resident, covered = Borders(needs(groups)), {}, set()
    for _ in range(1500):
        path = "".join(draw.choice("ab") for _ in range(draw.randint(1, 6)))
        group, tier = draw.randint(0, len(groups)), draw.randint(1, 2)
        places = resident.get(path, set())
        comes = (tier, group) not in places
        if comes and any(not resident.get(path[:end]) for end in range(1, len(path))):
            continue
        if (
            not comes
            and len(places) == 1
            and any(each.startswith(path) and each != path and resident[each] for each in resident)
        ):
            continue  # a block of which nothing is left has no block after it
        resident[path] = places ^ {(tier, group)}
        changed = note(borders, path, group, resident=comes, tier=tier)
        assert len(set(changed)) == len(changed)
        covered ^= set(changed)
        assert covered == {key(each) for each in searched(resident, groups)}
        assert all(borders.is_covered(each) for each in covered)
    for path in sorted(resident, key=len, reverse=True):
        for tier, group in resident[path]:
            note(borders, path, group, resident=False, tier=tier)
    assert not borders._nodes


def searched(resident, groups):
    """Paths of blocks that a request can go on after, and those before them."""

    def has(path, group):
        return any(each == group for _, each in resident.get(path, ()))

    def complete(path):
        return has(path, 0) and all(
            has(path[: at + 1], number)
            for number, group in enumerate(groups, 1)
            for lo, hi in group(len(path))
            for at in range(lo, hi)
        )

    ends = [path for path in resident if complete(path)]
    return {path[: end + 1] for path in ends for end in range(len(path))}
