"""Host memory of groups of layers that outlives the process: found whole, or a miss."""

import json
from dataclasses import replace

import numpy as np
import pytest
from group_restarts import compare, kill
from group_world import MODELS, SIZE, World, play, prompt
from kept import flip, memory_folder

from kvtrie import ResumePoints, Tier
from kvtrie.cli import main
from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.group_pages import slot_start
from kvtrie.tiers import KeptPool, NotesUses, Pool, open_pools

WALL = 10**18
ROOM = {"gpu": 60_000, "host": 400_000}


@pytest.fixture
def path():
    """A path for the files of a host tier."""
    with memory_folder() as folder:
        yield folder / "kv"


def contents(world):
    """The bytes of all blocks that give their digests, by group."""
    found = []
    for pool in world.pools[1].groups:
        found.append(set())
        for slot, key, *_ in pool.file.blocks(WALL):
            try:
                layers = pool.file.layers_to_verify(slot)
                if layers is not None:
                    pool.file.verify_block(slot, key, pool._bytes(slot, layers))
            except TransferError:
                continue
            found[-1].add(pool.block(slot).numpy().tobytes())
    return found


def taken_over(world):
    assert isinstance(world.pools[1], KeptPool)
    return contents(world)


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_a_restart_finds_what_was_sealed_and_each_byte_is_right(groups, path):
    with World(groups, **ROOM, keep=str(path)) as world:
        assert isinstance(world.pools[1], KeptPool)
        assert isinstance(world.pools[1], NotesUses)
        sessions = play(world, 80)
        world.executor.save()
        found = contents(world)
        kept = [len(pool.file.blocks(WALL)) for pool in world.pools[1].groups]
        assert world.pools[1].kept_blocks == sum(kept)
    with World(groups, **ROOM, keep=str(path), seed=10) as world:
        assert world.executor.restore() > 10
        world.manager.audit()
        total = compare(world, found, sessions)
        play(world, 30)
    assert total > 30
    assert world.compared[1]


@pytest.mark.parametrize("group", range(2))
def test_a_damaged_part_of_a_point_is_a_miss_of_that_point_alone(group, path):
    groups = MODELS["windows"]
    paths = [prompt(seed, 7) for seed in range(3)]
    with World(groups, **ROOM, keep=str(path)) as world:
        for tokens in paths:
            world.serve(tokens, [])
        world.executor.save()
        pool = world.pools[1].groups[group]
        wanted = world.bytes_of(group, paths[0], 6).numpy().tobytes()
        slots = [row[0] for row in pool.file.blocks(WALL)]
        (slot,) = [slot for slot in slots if pool.block(slot).numpy().tobytes() == wanted]
        at = slot_start(slot, pool.slots.page, pool.slots.slot_bytes)
    flip(path.with_name("kv-pages"), at + 5)
    with World(groups, gpu=200_000, host=400_000, keep=str(path)) as world:
        world.executor.restore()
        for tokens in paths:
            world.serve([*tokens, 99], [])
        assert world.found[0] < 28
        assert world.found[1:] == [28, 28]
        world.manager.audit()
        world.serve([*paths[0], 98], [])
        assert world.serve([*paths[0], 97], []) == 28


def test_a_page_that_goes_to_another_group_empties_its_entries(path):
    with World(MODELS["windows"], **ROOM, keep=str(path)) as world:
        world.serve(prompt(1, 6), [])
        world.executor.save()
        full, windows = world.pools[1].groups
        pages = {row[0] // full.slots.per_page for row in full.file.blocks(WALL)}
        assert pages
        assert not pages & {row[0] // windows.slots.per_page for row in windows.file.blocks(WALL)}
        windows.begin(
            np.array([page * windows.slots.per_page for page in pages]),
            [bytes(32)] * len(pages),
            (0, 3),
        )
        assert full.file.blocks(WALL) == []
        assert len(windows.file.blocks(WALL)) == 3  # two of the end, one of the border before


def test_after_a_kill_a_point_is_found_whole_or_not_at_all(path):
    kill("four groups", 1, taken_over, {**ROOM, "keep": str(path)})


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_after_many_kills_a_point_is_found_whole_or_not_at_all(name, path):
    kill(name, 10, taken_over, {**ROOM, "keep": str(path)})


def test_what_cannot_be_taken_over_is_refused_or_made_again(path):
    groups = MODELS["windows"]
    with World(groups, **ROOM, keep=str(path)) as world:
        world.serve(prompt(1, 6), [])
        world.executor.save()
        model, tiers = world.model, world.tiers
        other = open_pools(model, tiers, SIZE, resume=ResumePoints())
        assert type(other[1]) is Pool, "another process has the files"
    narrow = replace(model, groups=(groups[0], replace(groups[1], window=6)))
    with pytest.raises(ConfigError, match="keep_replace=True"):
        open_pools(narrow, tiers, SIZE, resume=ResumePoints())
    larger = Tier("host", bytes=500_000, keep=str(path))
    with World(groups, gpu=60_000, host=500_000, keep=str(path)) as again:
        assert again.executor.restore() == 0
        assert again.pools[1].nbytes <= larger.bytes
    outside = Tier("host", bytes=400_000, keep="/var/tmp/kvtrie-kept")  # noqa: S108 - no tmpfs
    with pytest.raises(ConfigError, match="which is not memory"):
        open_pools(model, (tiers[0], outside), SIZE, resume=ResumePoints())


@pytest.mark.parametrize("host", [300_000, 500_000])
def test_files_are_changed_with_the_first_block_and_not_before(path, host, tmp_path):
    groups = MODELS["windows"]
    with World(groups, **ROOM, keep=str(path)) as world:
        world.serve(prompt(1, 6), [])
        world.executor.save()
        tiers, model = world.tiers, world.model
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    with World(groups, gpu=60_000, host=host, keep=str(path)) as other:
        assert other.executor.restore() == 0
    (tmp_path / "disk").write_text("no folder")
    other = Tier("host", bytes=host, keep=str(path))
    disk = Tier("disk", bytes=400_000, path=str(tmp_path / "disk"))
    with pytest.raises((ConfigError, TransferError)):
        open_pools(model, (tiers[0], other, disk), SIZE, resume=ResumePoints())
    after = {file: file.read_bytes() for file in path.parent.iterdir()}
    assert {file: data[: len(before[file])] for file, data in after.items()} == before
    with World(groups, **ROOM, keep=str(path)) as world:
        assert world.executor.restore() > 0
    with World(groups, gpu=60_000, host=host, keep=str(path)) as other:
        other.serve(prompt(1, 6), [])
        other.executor.save()
    with World(groups, gpu=60_000, host=host, keep=str(path)) as other:
        assert other.executor.restore() > 0


def test_a_refused_call_leaves_no_files(path, tmp_path):
    with World(MODELS["windows"], **ROOM) as world:
        tiers, model = world.tiers, world.model
    (tmp_path / "disk").write_text("no folder")
    kept = Tier("host", bytes=400_000, keep=str(path))
    disk = Tier("disk", bytes=400_000, path=str(tmp_path / "disk"))
    with pytest.raises((ConfigError, TransferError)):
        open_pools(model, (tiers[0], kept, disk), SIZE, resume=ResumePoints())
    assert not [*path.parent.iterdir()]


def damaged(path, capsys):
    """Exit status of `kvtrie disk verify`, and its findings."""
    status = main(["disk", "verify", str(path), "--json"])
    stores = json.loads(capsys.readouterr().out)["stores"]
    return status, [row for store in stores for row in store["findings"]]


def test_the_disk_command_proves_the_pages_of_all_groups(path, capsys):
    with World(MODELS["windows"], **ROOM, keep=str(path)) as world:
        world.serve(prompt(1, 6), [])
        world.executor.save()
        blocks = [len(pool.file.blocks(WALL)) for pool in world.pools[1].groups]
        slots = [pool.file.blocks(WALL)[0][0] for pool in world.pools[1].groups]
        starts = [
            pool.block(slot).data_ptr() - world.pools[1].planes[0].data_ptr()
            for pool, slot in zip(world.pools[1].groups, slots, strict=True)
        ]
        pages = path.with_name("kv-pages")
        flip(pages, starts[0])
        status, rows = damaged(path, capsys)
        assert (status, [row["slot"] for row in rows]) == (1, slots[:1])
        assert not rows[0]["removed"]
        flip(pages, starts[0])
    assert main(["disk", "ls", str(path)]) == 0
    assert capsys.readouterr().out.count("kv-group") == 2
    assert damaged(path.parent, capsys) == (0, [])
    for start in starts:
        flip(pages, start)
    status, rows = damaged(path, capsys)
    assert (status, [row["slot"] for row in rows]) == (1, slots)
    assert {row["reason"] for row in rows} == {"its bytes are damaged"}
    assert all(row["removed"] for row in rows)
    assert damaged(path, capsys) == (0, [])
    pages.unlink()
    status, rows = damaged(path, capsys)
    assert (status, len(rows)) == (1, sum(blocks) - len(slots))


def test_the_disk_command_leaves_files_that_an_engine_has(path, capsys):
    with World(MODELS["windows"], **ROOM, keep=str(path)) as world:
        world.serve(prompt(1, 6), [])
        world.executor.save()
        before = sorted(path.parent.iterdir())
        assert main(["disk", "gc", str(path), "--older-than", "0"]) == 0
        assert capsys.readouterr().out.count("left alone: process") == 2
        assert sorted(path.parent.iterdir()) == before


def test_the_disk_command_removes_the_pages_with_the_last_table(path, capsys):
    with World(MODELS["windows"], **ROOM, keep=str(path)) as world:
        world.serve(prompt(1, 6), [])
        world.executor.save()
    assert main(["disk", "verify", str(path.parent)]) == 0
    assert capsys.readouterr().out.count(" 0 findings") == 2
    assert main(["disk", "gc", str(path.parent), "--older-than", "0"]) == 0
    assert [*path.parent.iterdir()] == []
