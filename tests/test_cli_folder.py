"""`kvtrie disk verify` and `gc`: damaged blocks, failing devices, unused and broken stores."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from disk_command import DAY, PROMPTS, filled, on_disk, refused, run, run_json
from keeping import DISK, SHAPE, SIZE, Clock, ask, fill, plant, prompt, rows, serving, stores

from kvtrie._kvtrie import DiskStore, Faults
from kvtrie.cli import folder as cli_folder
from kvtrie.tiers import DiskStorage


@pytest.fixture
def folder(tmp_path):
    """Twelve blocks, last used five days ago."""
    return filled(tmp_path)


def test_verify_finds_five_planted_faults_and_removes_them(capsys, folder):
    hit = plant(folder)
    before = dict(rows(folder))
    (store,) = run_json(capsys, "verify", folder, status=1)["stores"]
    assert store["read_only"] is None
    assert store["blocks"] == 11  # the twelfth has no frame
    reasons = {finding["slot"]: finding["reason"] for finding in store["findings"]}
    assert set(reasons) == {None} | set().union(*hit.values()) - hit["unframed"]
    assert "are no frames and were skipped" in reasons[None]
    for fault, reason in {
        "flipped": "layer 2 has checksum",
        "blanked": "empty; empty",
        "swapped": "header of slot",
        "cut": "segment-00000 ends at",
    }.items():
        assert all(reason in reasons[slot] for slot in hit[fault])
    for finding in store["findings"]:
        assert finding["removed"]
        if finding["slot"] is not None:
            assert bytes.fromhex(finding["key"]) == before[finding["slot"]]
    (store,) = run_json(capsys, "verify", folder)["stores"]
    assert (store["blocks"], store["findings"]) == (6, [])
    assert {slot for slot, _ in rows(folder)} == set(before) - set().union(*hit.values())
    with serving(folder) as executor:
        assert executor.restore() == 6
        assert sum(ask(executor, tokens) for tokens in PROMPTS) == 6 * SIZE


def test_verify_prints_a_table_of_what_it_found(capsys, folder):
    assert run(capsys, "verify", folder) == (
        0,
        f"{stores(folder)[0]}: 12 blocks read, 0 findings\n",
        "",
    )
    hit = plant(folder)
    keys = dict(rows(folder))
    status, out, err = run(capsys, "verify", folder)
    assert (status, err) == (1, "")
    head, columns, *lines, last = out.splitlines()
    assert head.endswith("11 blocks read, 6 findings")
    assert columns.split() == ["slot", "key", "reason"]
    assert last == "    6 removed"
    assert len(lines) == 6
    (flipped,) = hit["flipped"]
    row = next(line.split() for line in lines if line.split()[0] == str(flipped))
    assert row[1:4] == [keys[flipped].hex()[:16], "layer", "2"]


def test_verify_removes_nothing_beside_a_writer(capsys, folder):
    with DiskStorage(folder, SHAPE, DISK, SIZE):
        hit = plant(folder)
        files = {path: path.read_bytes() for path in folder.rglob("segment*")}
        (store,) = run_json(capsys, "verify", folder, status=1)["stores"]
        assert len(store["findings"]) == 6
        assert not any(finding["removed"] for finding in store["findings"])
        out = run(capsys, "verify", folder)[1]
        assert out.endswith(f"    nothing was removed: process {os.getpid()} writes here\n")
        assert files == {path: path.read_bytes() for path in folder.rglob("segment*")}
    assert len(set().union(*hit.values())) == 6


def test_slots_used_again_while_verify_reads_are_no_findings(folder):
    (store,) = stores(folder)
    with serving(folder, disk=12) as executor:

        def watch(blocks):
            assert len(blocks) == 12
            for seed in range(100, 124):
                ask(executor, prompt(seed))
            executor.flush()
            return blocks

        result = cli_folder.verify(store, time.time_ns(), watch)
    assert result.blocks == 12
    assert result.findings == []
    assert result.read_only == f"process {os.getpid()} writes here"


def test_verify_counts_what_a_failing_device_leaves(capsys, folder, monkeypatch):
    faults = Faults()
    faults.inject("read", after=8)  # somewhere in the third block

    class Failing:
        def __new__(cls, *arguments, **settings):
            return faults.open(*arguments, **settings)

        inspect = DiskStore.inspect
        stores = DiskStore.stores

    monkeypatch.setattr(cli_folder, "DiskStore", Failing)
    status, out, _ = run(capsys, "verify", folder)
    assert status == 1
    assert "Input/output error" in out
    assert out.endswith("    0 removed, 1 left: the device failed\n")
    monkeypatch.undo()
    assert run_json(capsys, "verify", folder)["stores"][0]["blocks"] == 12


def test_gc_gives_free_space_back_and_prints_its_size(capsys, folder):
    with serving(folder) as executor:
        executor.restore()
        for slot, _ in rows(folder)[:7]:
            executor.pools[2].store.remove(slot)
    before = on_disk(folder)
    document = run_json(capsys, "gc", folder)
    (store,) = document["stores"]
    assert document["freed"] == store["freed"] == before - on_disk(folder) > 5 * 20_000
    assert (store["removed"], store["read_only"]) == (False, None)
    status, out, err = run(capsys, "gc", folder)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "0 B freed (0 bytes)"
    assert run_json(capsys, "verify", folder)["stores"][0]["blocks"] == 5


def test_gc_removes_stores_that_nobody_has_used(capsys, folder):
    new, used, empty = (replace(SHAPE, fingerprint=name) for name in ("new", "used", "empty"))
    fill(folder, PROMPTS[:2], shape=new, wall=Clock(time.time_ns()))
    settings = {"shape": used, "clock": Clock(1000 * DAY)}
    with serving(folder, wall=Clock(time.time_ns() - 9 * DAY), **settings) as executor:
        ask(executor, PROMPTS[0])
        executor.save()
    with serving(folder, wall=Clock(time.time_ns() - 2 * DAY), **settings) as executor:
        executor.restore()
        ask(executor, PROMPTS[1])  # one old block and a younger one
        executor.save()
    DiskStorage(folder, empty, 8, SIZE).close()
    for store in run_json(capsys, "gc", folder, "--older-than", 5.5)["stores"]:
        assert not store["removed"]
    (old,) = [
        Path(store["store"])
        for store in run_json(capsys, "ls", folder)["stores"]
        if store["about"]["fingerprint"] == SHAPE.fingerprint
    ]
    size = on_disk(old)
    document = run_json(capsys, "gc", folder, "--older-than", 4.5)
    removed = [store for store in document["stores"] if store["removed"]]
    assert [store["store"] for store in removed] == [str(old)]
    assert document["freed"] == removed[0]["freed"] == size
    assert len(list(folder.iterdir())) == 3
    status, out, _ = run(capsys, "gc", folder, "--older-than", "1")
    assert status == 0
    assert out.count(": removed, ") == 1
    left = [store["about"]["fingerprint"] for store in run_json(capsys, "ls", folder)["stores"]]
    assert sorted(left) == ["empty", "new"]


def test_gc_finishes_a_removal_that_was_interrupted(capsys, folder):
    (store,) = stores(folder)
    fill(folder, PROMPTS[:1], shape=replace(SHAPE, fingerprint="other"))
    store.rename(store.with_name(f"{store.name}.removed"))
    (folder / "notes.removed").write_text("not ours")
    size = on_disk(store.with_name(f"{store.name}.removed"))
    assert run_json(capsys, "gc", folder)["freed"] == size
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["notes.removed", stores(folder)[0].name]
    )


@pytest.mark.parametrize("action", ["ls", "verify", "gc"])
def test_a_store_that_cannot_be_read_hides_no_other(capsys, folder, action):
    fill(folder, PROMPTS[:1], shape=replace(SHAPE, fingerprint="other"))
    broken, whole = sorted(stores(folder), key=lambda store: len(DiskStore.inspect(store).about))
    manifest = broken / "manifest"
    good = manifest.read_bytes()
    for bad, reason in (
        (b"", "no complete header"),
        (bytes([good[0] ^ 1]) + good[1:], "no complete header"),
        (good[:30] + bytes([good[30] ^ 1]) + good[31:], "wrong checksum of the header"),
    ):
        manifest.write_bytes(bad)
        status, out, err = run(capsys, action, folder)
        assert status == 2
        assert whole.name in out
        assert err.count("\n") == 1
        assert err.startswith(f"kvtrie disk {action}: {manifest}: {reason}")
        document = json.loads(run(capsys, action, folder, "--json")[1])
        assert [Path(store["store"]) for store in document["stores"]] == [whole]
        assert reason in document["unreadable"][0]
        assert manifest.read_bytes() == bad
    manifest.unlink()
    assert "manifest: No such file" in run(capsys, action, folder)[2]


def test_a_store_under_a_wrong_name_is_not_touched(capsys, folder):
    (store,) = stores(folder)
    store.rename(store.with_name("0123456789abcdef"))
    for action in ("verify", "gc"):
        assert f"that would be {store.name}" in refused(capsys, action, folder)
    assert run_json(capsys, "ls", folder)["stores"][0]["blocks"] == 12
    fill(folder, PROMPTS[:1], shape=replace(SHAPE, fingerprint="other"))
    status, out, err = run(capsys, "verify", folder)
    assert (status, err.count("\n")) == (2, 1)
    assert "1 blocks read, 0 findings" in out  # the other store is not left out
