"""`kvtrie disk gc` over the stores of groups of layers: a part goes with what it serves."""

import time
from contextlib import closing

import pytest
from disk_command import DAY, run
from group_world import MODELS, World, prompt

from kvtrie._kvtrie import DiskStore, Index
from kvtrie.cli import folder as cli_folder
from kvtrie.cli.parts import parts

ROOM = {"gpu": 60_000, "disk": 4_000_000}


@pytest.fixture
def stores(tmp_path):
    """The stores of the full layers and of the windows of a model, after two prompts."""
    with World(MODELS["windows"], **ROOM, folder=tmp_path) as world:
        for seed in (1, 2):
            world.serve(prompt(seed, 6), [])
        world.executor.save()
        return [one.store.folder for one in world.pools[-1].groups]


def rows(store):
    with closing(DiskStore.inspect(store)) as seen:
        return seen.blocks(time.time_ns())


def drop(store, keep):
    """Free all but the first `keep` blocks of a store."""
    wall = time.time_ns()
    with closing(cli_folder._open(store)) as opened:
        opened.save(Index(list(opened.index(wall))[:keep]), wall)


def test_windows_without_their_full_blocks_are_not_found_and_gc_frees_them(
    tmp_path, stores, capsys
):
    full, windows = stores
    assert (len(rows(full)), len(rows(windows))) == (12, 6)
    drop(full, 6)
    known = {row[1] for row in rows(full)}
    served = [row[:2] for row in rows(windows) if row[1] in known]
    assert len(served) == 3
    with World(MODELS["windows"], **ROOM, folder=tmp_path) as world:
        world.executor.restore()
        disk = world.manager.stats().tiers["disk"]
        assert [group.held for group in disk.groups] == [6, 2]
        found = [world.serve([*prompt(seed, 6), 99], []) for seed in (1, 2)]
        assert sorted(found) == [0, 24]
    drop(full, 6)
    assert run(capsys, "gc", tmp_path)[0] == 0
    assert {row[1] for row in rows(windows)} <= {row[1] for row in rows(full)}


def test_gc_keeps_all_stores_of_a_model_while_one_is_in_use(tmp_path, stores):
    full, windows = stores
    now = time.time_ns()
    later = now + 40 * DAY
    with closing(cli_folder._open(full)) as opened:
        opened.note_uses(opened.index(now), later)
    known = parts(stores, later)
    assert [known[store].age // DAY for store in stores] == [0, 0]
    assert known[full].keys is None
    assert known[windows].keys == {row[1] for row in rows(full)}
    for store in stores:
        assert not cli_folder.clean(store, later, 30 * DAY, known[store]).removed
    much_later = later + 40 * DAY
    known = parts(stores, much_later)
    for store in stores:
        assert cli_folder.clean(store, much_later, 30 * DAY, known[store]).removed
    assert not list(tmp_path.glob("*/manifest*"))


def test_without_the_store_of_the_first_group_nothing_is_concluded(tmp_path, stores, capsys):
    full, windows = stores
    blocks = len(rows(windows))
    full.rename(tmp_path / "elsewhere")
    assert parts([windows], time.time_ns()) == {}
    assert run(capsys, "gc", windows.parent)[0] in (0, 2)
    assert len(rows(windows)) == blocks
