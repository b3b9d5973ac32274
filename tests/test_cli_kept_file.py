"""`kvtrie disk` on the file of a kept host tier."""

from __future__ import annotations

import json

import pytest
from keeping import SHAPE, SIZE, ask, prompt
from kept import ENTRY, HEADER, flip, kept_serving, memory_folder

from kvtrie._kvtrie import KeptFile
from kvtrie.cli import main

PROMPTS = [prompt(seed, 2) for seed in range(4)]


@pytest.fixture
def kept():
    """The path of a kept file with four prompts of two blocks."""
    with memory_folder() as folder:
        path = folder / "pool"
        with kept_serving(path) as executor:
            for tokens in PROMPTS:
                ask(executor, tokens)
            executor.save()
        yield path


def run(capsys, *words):
    status = main(["disk", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("whole", [True, False])
def test_ls_lists_the_blocks_of_a_file(capsys, kept, whole):
    status, document = run(capsys, "ls", "--blocks", kept.parent if whole else kept)
    (store,) = document["stores"]
    assert status == 0
    assert (store["blocks"], store["slots"], store["read_only"]) == (8, 16, None)
    assert store["about"]["fingerprint"] == SHAPE.fingerprint
    assert store["bytes"] >= 16 * SHAPE.block_bytes(SIZE)
    assert all(row["rooted"] for row in store["rows"])


def test_verify_finds_damage_and_removes_it(capsys, kept):
    pool = kept.stat().st_size - 16 * SHAPE.block_bytes(SIZE)
    slots = [row[0] for row in KeptFile.inspect(kept).blocks(0)]
    assert run(capsys, "verify", kept)[0] == 0
    flip(kept, pool + slots[0] * SHAPE.block_bytes(SIZE))
    flip(kept, HEADER + slots[1] * ENTRY + 20)
    status, document = run(capsys, "verify", kept)
    findings = document["stores"][0]["findings"]
    assert status == 1
    assert [row["reason"] for row in findings] == ["an entry is damaged", "its bytes are damaged"]
    assert all(row["removed"] for row in findings)
    assert run(capsys, "verify", kept)[0] == 0
    assert run(capsys, "ls", kept)[1]["stores"][0]["blocks"] == 6


def test_a_file_that_an_engine_has_is_only_read(capsys, kept):
    pool = kept.stat().st_size - 16 * SHAPE.block_bytes(SIZE)
    with kept_serving(kept) as executor:
        executor.restore()
        assert "writes here" in run(capsys, "ls", kept)[1]["stores"][0]["read_only"]
        slot = int(executor.pools[1].recall().slot[0])
        flip(kept, pool + slot * SHAPE.block_bytes(SIZE))
        status, document = run(capsys, "verify", kept)
        assert status == 1
        assert [row["removed"] for row in document["stores"][0]["findings"]] == [False]
        status, document = run(capsys, "gc", "--older-than", "0", kept)
        assert not document["stores"][0]["removed"]
    assert kept.exists()


def test_gc_removes_an_old_file_whole(capsys, kept):
    size = 512 * kept.stat().st_blocks
    assert run(capsys, "gc", kept)[1]["freed"] == 0
    assert run(capsys, "gc", "--older-than", "1", kept)[1]["freed"] == 0
    status, document = run(capsys, "gc", "--older-than", "0", kept)
    assert (status, document["freed"], kept.exists()) == (0, size, False)


def test_another_file_is_named(capsys, kept):
    kept.write_bytes(b"x" * 9000)
    assert main(["disk", "ls", str(kept)]) != 0
    assert "is no kept file" in capsys.readouterr().err
