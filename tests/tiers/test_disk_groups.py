"""A disk of groups of layers: what a request finds after a restart is what the files have."""

import shutil

import numpy as np
import pytest
from group_restarts import compare, kill
from group_world import MODELS, SIZE, World, play, prompt

from kvtrie import Tier
from kvtrie._kvtrie import DiskStore
from kvtrie.cli import main
from kvtrie.errors import ConfigError, TransferError
from kvtrie.model.group_pages import GroupPages
from kvtrie.tiers import DiskStorage, NotesUses

WALL = 10**18
ROOM = {"gpu": 60_000, "disk": 4_000_000}


def contents(world, folder):
    """The bytes of all sound blocks on disk, by group."""
    found = [set() for _ in world.model.groups]
    for path, why in DiskStore.stores(folder):
        assert why is None
        store = DiskStore.inspect(path)
        memory = np.empty((store.layers, store.layer_bytes), dtype=np.uint8)
        group = next(
            at
            for at, one in enumerate(world.pools[-1].groups)
            if one.store.folder.name == path.name
        )
        for slot, key, lo, hi, *_ in store.blocks(WALL):
            try:
                store.read(key, slot, (lo, hi), memory)
            except TransferError:
                continue
            found[group].add(memory.tobytes())
        store.close()
    return found


def taken_over(world):
    disk = world.pools[-1]
    assert not disk.read_only
    return contents(world, disk.folder)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.deep)])
@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_a_restart_finds_what_the_files_have_and_each_byte_is_right(groups, seed, tmp_path):
    with World(groups, **ROOM, folder=tmp_path, seed=seed) as world:
        assert isinstance(world.pools[-1], NotesUses)
        sessions = play(world, 150)
        world.executor.save()
        found = contents(world, tmp_path)
    with World(groups, **ROOM, folder=tmp_path, seed=seed + 10) as world:
        assert world.executor.restore() > 10
        world.manager.audit()
        total = compare(world, found, sessions)
        play(world, 60)
    assert total > 30


@pytest.mark.parametrize("group", range(4))
def test_a_damaged_part_of_a_point_is_a_miss_of_that_point_alone(group, tmp_path):
    groups = MODELS["four groups"]
    paths = [prompt(seed, 7) for seed in range(4)]
    # The first point leaves the first tier before the blocks that lead to it.
    with World(groups, **ROOM, folder=tmp_path) as world:
        for tokens in paths:
            world.serve(tokens, [])
        world.executor.save()
        folder = world.pools[-1].groups[group].store.folder
        flip(folder, world.bytes_of(group, paths[0], 6).numpy())
    with World(groups, gpu=200_000, disk=4_000_000, folder=tmp_path) as world:
        world.executor.restore()
        for tokens in paths:
            world.serve([*tokens, 99], [])
        assert world.found == [0, 28, 28, 28]
        world.manager.audit()
        world.serve([*paths[0], 98], [])
        assert world.serve([*paths[0], 97], []) == 28


def flip(folder, wanted):
    """Flip a bit of the block with these bytes."""
    store = DiskStore.inspect(folder)
    memory = np.empty((store.layers, store.layer_bytes), dtype=np.uint8)
    for slot, key, lo, hi, *_ in store.blocks(WALL):
        store.read(key, slot, (lo, hi), memory)
        if np.array_equal(memory.reshape(-1), wanted):
            break
    else:
        raise AssertionError("the block is not there")
    at = (slot + 1) * store.slot_bytes - store.layers * 4096 + 5
    data = bytearray((folder / "segment-00000").read_bytes())
    data[at] ^= 4
    (folder / "segment-00000").write_bytes(data)
    store.close()


def test_the_disk_command_reads_the_stores_of_all_groups(tmp_path, capsys):
    groups = MODELS["four groups"]
    with World(groups, **ROOM, folder=tmp_path) as world:
        play(world, 60)
        world.executor.save()
        damaged = world.pools[-1].groups[1].store.folder
        blocks = len(world.manager.index("disk", now=world.tick()))
    assert main(["disk", "ls", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert all(f"group {at}, groups" in listed for at in range(len(groups)))
    assert main(["disk", "verify", str(tmp_path)]) == 0
    read = [line for line in capsys.readouterr().out.splitlines() if "0 findings" in line]
    assert sum(int(line.split(": ")[1].split()[0]) for line in read) == blocks
    assert main(["disk", "gc", str(tmp_path)]) == 0
    assert main(["disk", "verify", str(tmp_path)]) == 0
    data = max(damaged.iterdir(), key=lambda file: file.stat().st_blocks)
    data.write_bytes(bytes(data.stat().st_size))
    capsys.readouterr()
    assert main(["disk", "verify", str(tmp_path)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "0 findings" not in line]
    assert any(damaged.name in line for line in wrong)


def test_after_a_kill_a_point_is_found_whole_or_not_at_all(tmp_path):
    kill("four groups", 1, taken_over, {**ROOM, "folder": str(tmp_path)})


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_after_many_kills_a_point_is_found_whole_or_not_at_all(name, tmp_path):
    kill(name, 25, taken_over, {**ROOM, "folder": str(tmp_path)})


def test_pages_that_go_to_another_group_leave_no_bytes_of_the_first(tmp_path):
    with World(MODELS["windows"], gpu=60_000, disk=1_000_000, folder=tmp_path) as world:
        play(world, 200)
        world.executor.save()
        disk, per_page = world.pools[-1], GroupPages.of(world.model, world.tiers[-1], SIZE).per_page
        used = sum(one.store.disk_bytes for one in disk.groups)
        assert used <= 1_000_000
        pages = [
            {row[0] // each for row in one.store.blocks(WALL)}
            for one, each in zip(disk.groups, per_page, strict=True)
        ]
        assert not pages[0] & pages[1]
        # A third of the pages in the files of the other group.
        store = disk.groups[1].store
        blocks = store.blocks(WALL)
        for page in pages[1]:
            first = page * per_page[0]
            disk.groups[0]._take([first])
        assert store.blocks(WALL) == []
        assert blocks


def test_a_second_process_only_reads(tmp_path):
    with World(MODELS["windows"], **ROOM, folder=tmp_path) as world:
        world.serve(prompt(1, 6), [])
        world.executor.save()
        with World(MODELS["windows"], **ROOM, folder=tmp_path) as reader:
            assert reader.pools[-1].read_only
            assert "writes here" in reader.pools[-1].refusal
            reader.executor.restore()
            assert reader.serve([*prompt(1, 6), 99], []) == 24
            reader.serve(prompt(2, 6), [])
            reader.executor.flush()
            assert "read-only" in reader.manager.failed()[0].reason
    shutil.rmtree(tmp_path)


def test_what_a_disk_of_groups_cannot_be_is_refused(tmp_path):
    with World(MODELS["windows"], **ROOM, folder=tmp_path) as world:
        small = Tier("disk", bytes=50_000, path=str(tmp_path))
        with pytest.raises(ConfigError, match="a block of the first group takes"):
            DiskStorage.of_tier(world.model, small, SIZE, separate_groups=True)
        nowhere = Tier("disk", bytes=4_000_000)
        with pytest.raises(ConfigError, match="needs a path"):
            DiskStorage.of_tier(world.model, nowhere, SIZE, separate_groups=True)
