"""`kvtrie disk`: what it reports about a folder, what it removes and what it leaves alone."""

import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from keeping import DISK, SHAPE, SIZE, Clock, ask, fill, plant, prompt, rows, serving, stores

from kvtrie._kvtrie import DiskStore, Faults
from kvtrie.cli import folder as cli_folder
from kvtrie.cli import main
from kvtrie.tiers import DiskStorage

KVTRIE = Path(sys.executable).with_name("kvtrie")
DAY = 24 * 60 * 60 * 10**9
PROMPTS = [prompt(seed) for seed in range(12)]


@pytest.fixture
def folder(tmp_path):
    """Twelve blocks, last used five days ago."""
    fill(tmp_path, PROMPTS, wall=Clock(time.time_ns() - 5 * DAY))
    return tmp_path


def run(capsys, *arguments):
    """Exit status, standard output and error of one command."""
    try:
        status = main(["disk", *map(str, arguments)])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys, *arguments, status=0):
    """The JSON output of a command."""
    ended, out, err = run(capsys, *arguments, "--json")
    assert (ended, err) == (status, "")
    return json.loads(out)


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kvtrie disk")
    assert err.count("\n") == 1
    return err


def on_disk(folder):
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def test_help_lists_the_actions_and_their_arguments(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for action in ("ls", "verify", "gc"):
        assert f"\n    {action} " in out
        status, more, _ = run(capsys, action, "--help")
        assert status == 0
        assert "FOLDER" in more
        assert "--json" in more
    assert "--blocks" in run(capsys, "ls", "--help")[1]
    assert "--older-than DAYS" in run(capsys, "gc", "--help")[1]
    for wrong in ([], ["fly"], ["ls"], ["gc", "x", "--older-than", "-1"]):
        status, out, err = run(capsys, *wrong)
        assert (status, out) == (2, "")
        assert "usage: kvtrie disk" in err
    assert "at least 0, not 'soon'" in run(capsys, "gc", "x", "--older-than", "soon")[2]


@pytest.mark.parametrize("action", ["ls", "verify", "gc"])
def test_what_is_no_folder_of_stores_is_refused_in_one_line(capsys, tmp_path, action):
    assert f"no folder {tmp_path}/none" in refused(capsys, action, tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert f"no folder {tmp_path}/file" in refused(capsys, action, tmp_path / "file")
    assert f"no store in {tmp_path}" in refused(capsys, action, tmp_path)
    assert f"no store in {tmp_path}" in refused(capsys, action, tmp_path, "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ls_lists_stores_and_their_sizes(capsys, folder):
    document = run_json(capsys, "ls", folder)
    assert (document["folder"], document["unreadable"]) == (str(folder), [])
    (store,) = document["stores"]
    assert store["store"] == str(stores(folder)[0])
    about = store["about"]
    assert (about["layers"], about["kv_heads"], about["block_tokens"]) == (4, 2, SIZE)
    assert (store["blocks"], store["slots"]) == (12, DISK)
    assert store["bytes"] == on_disk(folder)
    assert store["read_only"] is None
    assert 5 * 86_400 <= store["youngest_s"] <= store["oldest_s"] < 6 * 86_400
    assert "rows" not in store
    status, out, err = run(capsys, "ls", folder)
    assert (status, err) == (0, "")
    name, blocks, slots, *_, youngest, day, oldest, _ = out.splitlines()[1].split()
    assert (name, blocks, slots) == (stores(folder)[0].name, "12", str(DISK))
    assert (youngest, day, oldest) == ("5", "d", "5")
    assert "layers 4, layout" in out
    assert "dtype float32" in out
    assert "free to write" in out


def test_ls_lists_blocks_on_request(capsys, folder):
    (store,) = run_json(capsys, "ls", folder, "--blocks")["stores"]
    assert {(row["slot"], bytes.fromhex(row["key"])) for row in store["rows"]} == set(rows(folder))
    assert all(row["layers"] == [0, 4] and row["rooted"] for row in store["rows"])
    assert {row["uses"] for row in store["rows"]} == {1}
    out = run(capsys, "ls", folder, "--blocks")[1]
    assert len(out.splitlines()) == 5 + 12
    for slot, key in rows(folder):
        assert f"{slot:9d}  {key.hex()[:16]} " in out


def test_ls_marks_a_block_whose_path_is_broken(capsys, tmp_path):
    fill(tmp_path, [prompt(1, 2)])
    (store,) = stores(tmp_path)
    seen = DiskStore.inspect(store)
    first = next(slot for slot, *_ in seen.blocks(0))
    with serving(tmp_path) as executor:
        executor.pools[2].store.remove(first)
    (listed,) = run_json(capsys, "ls", tmp_path, "--blocks")["stores"]
    assert [row["rooted"] for row in listed["rows"]] == [False]
    assert run(capsys, "ls", tmp_path, "--blocks")[1].endswith("broken\n")


def test_several_models_and_an_empty_store_are_listed_separately(capsys, folder):
    DiskStorage(folder, replace(SHAPE, fingerprint="another"), 8, SIZE).close()
    listed = run_json(capsys, "ls", folder)["stores"]
    assert len(listed) == 2
    empty = next(store for store in listed if store["about"]["fingerprint"] == "another")
    assert (empty["blocks"], empty["youngest_s"], empty["oldest_s"]) == (0, None, None)
    out = run(capsys, "ls", folder)[1]
    assert "fingerprint another" in out
    assert len(run_json(capsys, "verify", folder)["stores"]) == 2


def test_a_running_writer_is_named_and_not_disturbed(capsys, folder):
    with serving(folder) as executor:
        executor.restore()
        (store,) = run_json(capsys, "ls", folder)["stores"]
        assert store["read_only"] == f"process {os.getpid()} writes here"
        assert store["read_only"] in run(capsys, "ls", folder)[1]
        (store,) = run_json(capsys, "verify", folder)["stores"]
        assert store["read_only"] == f"process {os.getpid()} writes here"
        assert (store["blocks"], store["findings"]) == (12, [])
        (store,) = run_json(capsys, "gc", folder, "--older-than", 1)["stores"]
        assert store["read_only"] == f"process {os.getpid()} writes here"
        assert (store["freed"], store["removed"]) == (0, False)
        assert "left alone: process" in run(capsys, "gc", folder)[1]
        assert [ask(executor, tokens) for tokens in PROMPTS] == [SIZE] * 12
    assert run_json(capsys, "ls", folder)["stores"][0]["read_only"] is None
    with serving(folder) as executor:  # looking has not kept the lock
        assert not executor.pools[2].read_only


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


def test_ctrl_c_ends_with_one_line_and_gives_the_lock_back(capsys, folder, monkeypatch):
    def interrupted(blocks, _what, *, quiet):
        assert not quiet
        yield from blocks[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtrie.cli.disk.watched", interrupted)
    assert run(capsys, "verify", folder) == (130, "", "Stopped.\n")
    with serving(folder) as executor:
        assert not executor.pools[2].read_only
        assert executor.restore() == 12


def test_neither_torch_nor_rich_is_needed(folder):
    code = (
        "import sys; sys.modules.update(torch=None, rich=None)\n"
        "from kvtrie.cli import main\n"
        "sys.exit(sum(main(['disk', *given.split(), sys.argv[1]]) for given in sys.argv[2:]))"
    )
    actions = ["ls --blocks", "verify --json", "gc --older-than 100"]
    command = [sys.executable, "-c", code, folder, *actions]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stderr == ""
    assert "12 blocks" not in ended.stdout
    assert '"findings": []' in ended.stdout


def test_a_terminal_sees_how_far_it_is(folder):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    command = [KVTRIE, "disk", "verify", folder]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        out = process.stdout.read().decode()
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.returncode == 0
    assert out == f"{stores(folder)[0]}: 12 blocks read, 0 findings\n"
    assert f"Verifying {stores(folder)[0].name}".encode() in seen
