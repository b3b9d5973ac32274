"""The folder of a store: opened once, and what its path leads to later changes nothing."""

import logging
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from keeping import SIZE, ask, fill, prompt, serving, stores

from kvtrie.tiers.keyed_disk import KeyedDisk


def entries(folder):
    """Names and bytes of all files below a folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_relative_folder_stays_the_one_that_was_opened(tmp_path, monkeypatch):
    own_folder, other_folder = tmp_path / "here", tmp_path / "there"
    for folder in (own_folder, other_folder):
        folder.mkdir()
        monkeypatch.chdir(folder)
        fill("kv", [prompt(1)])
    other = entries(other_folder)
    monkeypatch.chdir(own_folder)
    with serving("kv") as executor:
        assert executor.restore() == 1
        monkeypatch.chdir(other_folder)
        for seed in range(2, 6):
            ask(executor, prompt(seed, 2))
        executor.save()
        executor.pools[2].store.gc()
        executor.pools[2].note_uses(executor.manager.index("disk", now=executor.clock()))
    assert entries(other_folder) == other
    with serving("kv") as executor:
        assert executor.restore() == 1
    monkeypatch.chdir(own_folder)
    with serving("kv") as executor:
        assert executor.restore() == 9
        assert all(ask(executor, prompt(seed, 2)) == 2 * SIZE for seed in range(2, 6))


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_folder_that_is_removed_or_replaced_is_reported_once(tmp_path, caplog, change):
    folder = tmp_path / "kv"
    with serving(folder) as executor, caplog.at_level(logging.WARNING, "kvtrie.tiers.disk"):
        storage = executor.pools[2]
        for seed in range(4):
            ask(executor, prompt(seed, 2))
        executor.save()
        shutil.rmtree(folder)
        if change == "replaced":
            fill(folder, [prompt(50)])
        before = entries(folder)
        for seed in range(4, 12):  # more than fits above the disk: some of it must go down
            ask(executor, prompt(seed, 2))
            executor.drain()
        index = executor.manager.index("disk", now=executor.clock())
        storage.note_uses(index)
        storage.note_uses(index)
        assert storage.read_only
        executor.save()
        executor.manager.audit()
        messages = [record.message for record in caplog.records]
        assert len(messages) == 1, messages
        assert "removed or replaced while open; nothing more is written" in messages[0]
    assert entries(folder) == before


def test_a_keyed_disk_whose_folder_is_removed_reports_it_once_and_reads_on(tmp_path, caplog):
    folder = tmp_path / "kv"
    disk = KeyedDisk(folder, meaning="a model", size=3000, blocks=2)
    data = [np.full(3000, value, np.uint8) for value in range(5)]
    assert disk.write_many([(b"0", data[0]), (b"1", data[1])]) == [True, True]
    shutil.rmtree(folder)
    memory = np.zeros(3000, np.uint8)
    with caplog.at_level(logging.WARNING, "kvtrie.tiers.keyed_disk"):
        assert disk.write_many([(b"2", data[2])]) == [False]
        assert disk.write_many([(b"3", data[3]), (b"4", data[4])]) == [False, False]
        assert disk.read_many([(b"0", memory)]) == [b"0" in disk]
        disk.close()
    assert [record.message.count("removed or replaced") for record in caplog.records] == [1]
    assert not folder.exists()


def test_a_store_that_was_moved_is_not_cleaned_under_its_old_name(tmp_path, monkeypatch):
    from kvtrie.cli import folder as cleaner

    fill(tmp_path / "kv", [prompt(1)])
    (store,) = stores(tmp_path / "kv")
    opened = cleaner._open

    def moved(path):
        found = opened(path)
        path.rename(tmp_path / "moved")
        path.mkdir()
        (path / "of another").write_text("program")
        return found

    monkeypatch.setattr(cleaner, "_open", moved)
    cleaned = cleaner.clean(store, 10**19, older_than=0)
    assert not cleaned.removed
    assert "removed or replaced" in cleaned.read_only
    assert entries(store) == {"of another": b"program"}


@pytest.mark.parametrize("arguments", [["disk", "ls", "kv"], ["--version"]])
def test_kvtrie_in_a_directory_that_is_gone(tmp_path, arguments):
    script = (
        "import os, sys; os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
        "sys.argv[:2] = ['kvtrie']\n"
        "from kvtrie.cli import main; sys.exit(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "gone", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    assert (ran.returncode == 0) == (arguments == ["--version"])
    assert ran.returncode == 0 or "gone" in ran.stderr or "no " in ran.stderr
