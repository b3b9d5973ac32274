"""Damaged scales, a format changed between servers, ranks of two formats: no wrong bytes."""

import shutil

import pytest
from kept import flip, memory_folder
from tests.engines.vllm_engine import LAYERS, SIZE, Engine

from kvtrie.errors import ConfigError

PROMPTS = [[at, *range(1, 3 * SIZE), at] for at in range(5)]
WHOLE = 3 * SIZE * len(PROMPTS)
UNIT, CODES = 192, 128  # bytes of a layer of a block in int8 or fp8, and of its codes
FORMATS = pytest.mark.parametrize("format_", ["int8", "fp8"])


def ask(engine):
    """Tokens of the prompts that were found, asked one by one; their bytes were right."""
    before = engine.found
    for tokens in PROMPTS:
        engine.add(str(len(engine.seen)), tokens, 1)
        engine.drain()
    assert engine.failed == 0
    return engine.found - before


def run(folder="", *, ranks=1, **more):
    """Tokens that a new server finds."""
    engine = Engine(folder, ranks, 0, 0, 20, **more)
    found = ask(engine)
    engine.close()
    return found


@FORMATS
def test_a_damaged_scale_in_kept_memory_is_a_miss(format_):
    with memory_folder() as folder:
        kept = {"keep": folder / "pool", "format_": format_}
        assert run(**kept) == 0
        pool = kept["keep"].stat().st_size - 20 * LAYERS * UNIT
        engine = Engine("", 1, 0, 0, 20, **kept)
        slots = engine.scheduler.manager.index("host", now=0).slot.tolist()
        engine.close()
        flip(kept["keep"], pool + (slots[0] * LAYERS + 1) * UNIT + CODES + 5, bit=6)
        found = run(**kept)
        assert WHOLE - 3 * SIZE <= found < WHOLE
        assert run(**kept) >= found


@FORMATS
def test_damaged_scales_on_disk_are_misses(format_, tmp_path):
    engine = Engine(tmp_path, 1, 0, 0, 20, format_=format_)
    assert ask(engine) == 0
    (worker,) = engine.workers
    slots = engine.scheduler.manager.index("host", now=0).slot.tolist()
    scales = [worker.host.planes[0][slot * LAYERS, CODES:].numpy().tobytes() for slot in slots[:3]]
    engine.close()
    (file,) = [
        one for one in tmp_path.rglob("*") if one.is_file() and scales[0] in one.read_bytes()
    ]
    for each in scales:
        flip(file, file.read_bytes().index(each) + 5, bit=6)
    assert 0 < run(tmp_path, format_=format_) < WHOLE
    assert run(tmp_path, format_=format_) == WHOLE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", ["disk", "store"])
def test_blocks_of_another_format_are_not_found(place, ranks, tmp_path):
    """int8 and fp8 have as many bytes, so that no length gives a mistake away."""
    where = {"folder": tmp_path} if place == "disk" else {"store": f"folder:{tmp_path}"}
    for format_, found in (("int8", 0), ("fp8", 0), (None, 0), ("int8", WHOLE), ("fp8", WHOLE)):
        assert run(**where, ranks=ranks, format_=format_) == found, format_


def test_ranks_of_two_formats_find_nothing_on_disk(tmp_path):
    for format_ in ("int8", "fp8"):
        assert run(tmp_path / format_, ranks=2, format_=format_) == 0
    mine, others = (sorted((tmp_path / format_).iterdir()) for format_ in ("int8", "fp8"))
    assert len(mine) == len(others) == 2
    for at, left in enumerate(mine):
        mixed = tmp_path / f"mixed {at}"
        shutil.copytree(left, mixed / left.name)
        for each in others:
            shutil.copytree(each, mixed / each.name)
        assert run(mixed, ranks=2, format_="int8") == 0
        assert run(mixed, ranks=2, format_="int8") == WHOLE


def test_kept_memory_of_ranks_of_two_formats_is_refused():
    with memory_folder() as folder:
        for format_ in ("int8", "fp8"):
            assert run(ranks=2, keep=folder / format_, format_=format_) == 0
        shutil.copy(folder / "fp8-1", folder / "int8-1")
        with pytest.raises(ConfigError, match="int8-1"):
            run(ranks=2, keep=folder / "int8", format_="int8")
