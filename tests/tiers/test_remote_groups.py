"""Groups of layers in a shared store: a value per block and group, found by another process."""

from pathlib import Path

import pytest
from group_restarts import naive
from group_world import MODELS, SIZE, World, play, prompt

from kvtrie import ModelShape
from kvtrie.tiers import BlockFormat
from kvtrie.tiers.remote.form import ValueNames

ROOM = {"gpu": 60_000, "host": 200_000}
GROUPS = pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)


@pytest.fixture
def url(tmp_path):
    return f"folder:{tmp_path}/kv?io=buffered"


def values(world):
    """The files of all values by group, and the bytes of each without its header."""
    (store,) = (pool for pool in world.pools if hasattr(pool, "url"))
    folder = Path(str(store.url.path))
    lengths = [part.form.value_bytes for part in store.groups]
    headers = [part.form.header_bytes for part in store.groups]
    assert len(set(lengths)) == len(lengths)
    files = [{} for _ in lengths]
    for path in folder.glob("??/*"):
        group = lengths.index(path.stat().st_size)
        files[group][path] = path.read_bytes()[headers[group] :]
    return files


def stored(url, groups, paths):
    """Serve prompts and store all of them; return the files of the store."""
    with World(groups, **ROOM, remote=url) as world:
        for tokens in paths:
            world.serve(tokens, [])
        world.executor.drain()
        assert world.manager.shared_stores[0] == 0
        return values(world)


@GROUPS
def test_another_process_finds_what_the_store_has_and_each_byte_is_right(groups, url):
    with World(groups, **ROOM, remote=url, seed=1) as world:
        sessions = play(world, 60)
        found = [set(files.values()) for files in values(world)]
        assert all(found)
    with World(groups, **ROOM, remote=url, seed=2) as world:
        expected = [naive(world, found, [*tokens, 99]) for tokens in sessions]
        for tokens in sessions:
            world.serve([*tokens, 99], [])
        assert all(was >= known for was, known in zip(world.found, expected, strict=True))
        assert sum(expected) > 30
        play(world, 40)


@pytest.mark.grid
@pytest.mark.parametrize("way", ["missing", "flipped", "swapped", "cut"])
@pytest.mark.parametrize("group", range(4))
def test_a_lost_value_of_one_group_is_a_miss_and_never_wrong(group, way, url):
    groups = MODELS["four groups"]
    paths = [prompt(seed, 7) for seed in range(3)]
    files = stored(url, groups, paths)
    with World(groups, **ROOM, remote=url) as world:
        lost = world.bytes_of(group, paths[0], 6).numpy().tobytes()
        other = world.bytes_of(group, paths[1], 6).numpy().tobytes()
        named = {value: path for path, value in files[group].items()}
        path = named[lost]
        raw = bytearray(path.read_bytes())
        if way == "missing":
            path.unlink()
        elif way == "flipped":
            raw[-3] ^= 1
            path.write_bytes(raw)
        elif way == "swapped":
            path.write_bytes(named[other].read_bytes())
        else:
            path.write_bytes(raw[:-1])
        for tokens in paths:
            world.serve([*tokens, 99], [])
        assert world.found[0] < 28
        assert world.found[1:] == [28, 28]
        world.executor.drain()
        world.manager.audit()
    with World(groups, **ROOM, remote=url) as world:
        # It was computed and stored again.
        world.serve([*paths[0], 99], [])
        assert world.found == [28]


def test_only_the_parts_that_the_last_borders_need_are_asked_for(url):
    groups = MODELS["states"]
    path = prompt(5, 400)
    room = {"gpu": 2_000_000, "host": 4_000_000}
    with World(groups, **room, remote=url) as world:
        world.serve(path, [])
        world.executor.drain()
    with World(groups, **room, remote=url) as world:
        found = world.executor.prefetch([*path, 99], deadline_s=30.0)
        assert found.found == 400
        # All blocks of the first group, and states of 64 borders.
        assert found.asked == 400 + 64


def test_names_of_groups_differ_and_the_first_has_those_of_one_group():
    model = ModelShape(8, 2, 8, groups=MODELS["four groups"], fingerprint="groups")
    forms = [BlockFormat.of_group(model, group, SIZE, None) for group in range(4)]
    names = [
        ValueNames.of(form, 0, 1, group=group, block_tokens=SIZE)
        for group, form in enumerate(forms)
    ]
    assert len({each.meaning for each in names}) == 4
    # A group of the same layers elsewhere has another name.
    assert ValueNames.of(forms[1], 0, 1, group=2).meaning != names[1].meaning
    plain = ModelShape(2, 2, 8, fingerprint="plain")
    form = BlockFormat.of(plain, None, SIZE)
    assert ValueNames.of(form, 0, 1, group=0) == ValueNames.of(form, 0, 1)
