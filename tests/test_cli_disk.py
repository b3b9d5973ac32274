"""`kvtrie disk`: help, lists of stores and blocks, a running writer, Ctrl-C and progress."""

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from disk_command import PROMPTS, filled, on_disk, refused, run, run_json
from keeping import DISK, SHAPE, SIZE, ask, fill, prompt, rows, serving, stores

from kvtrie._kvtrie import DiskStore
from kvtrie.tiers import DiskStorage

KVTRIE = Path(sys.executable).with_name("kvtrie")


@pytest.fixture
def folder(tmp_path):
    """Twelve blocks, last used five days ago."""
    return filled(tmp_path)


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
    assert f"{tmp_path}/file is no kept file" in refused(capsys, action, tmp_path / "file")
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
