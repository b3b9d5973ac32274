"""KeyedDisk with `keep`: blocks by an engine's keys in memory that the next process finds."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from kept import memory_folder

from kvtrie import ConfigError
from kvtrie.settings.machine import IN_MEMORY, file_system
from kvtrie.tiers.keyed_disk import KeyedDisk

SIZE = 3000


@pytest.fixture
def path():
    with memory_folder() as folder:
        yield folder / "kv"


def opened(path, blocks=8, **more):
    return KeyedDisk(
        path, **{"meaning": "a model", "size": SIZE, "blocks": blocks, "keep": True} | more
    )


def block(at):
    return np.random.default_rng(at).integers(0, 256, SIZE, np.uint8)


def keys(count, first=0):
    return [b"key %d" % at for at in range(first, first + count)]


def write(kept, count, first=0):
    rows = zip(keys(count, first), map(block, range(first, first + count)), strict=True)
    return kept.write_many([*rows])


def found(kept, count, first=0):
    """How many blocks are read; each of them is right."""
    rows = [(key, np.zeros(SIZE, np.uint8)) for key in keys(count, first)]
    results = kept.read_many(rows)
    for at, (good, (_, memory)) in enumerate(zip(results, rows, strict=True), first):
        assert not good or (memory == block(at)).all()
    return sum(results)


def test_the_next_process_finds_every_block(path):
    kept = opened(path)
    assert write(kept, 5) == [True] * 5
    assert found(kept, 6) == 5
    kept.close()
    assert (path.stat().st_mode & 0o777) == 0o600
    again = opened(path)
    assert len(again) == again.leading(keys(6)) == found(again, 6) == 5
    again.clear()
    assert len(again) == 0
    again.close()
    assert len(opened(path)) == 0


def test_a_killed_process_leaves_what_it_wrote(path):
    code = (
        f"import sys, os; sys.path[:] = {sys.path!r}\n"
        "from test_kept_slots import opened, write\n"
        f"kept = opened({str(path)!r})\n"
        "write(kept, 8)\n"
        "write(kept, 3, 8)\n"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    kept = opened(path)
    assert len(kept) == 8
    assert found(kept, 3, 8) == 3
    assert found(kept, 8) == 5
    kept.close()


def test_it_is_bounded_and_beginnings_stay(path):
    kept = opened(path)
    for chain in range(6):
        assert write(kept, 4, 4 * chain) == [True] * 4
        assert len(kept) <= 8
    for chain in range(6):
        present = [key in kept for key in keys(4, 4 * chain)]
        assert present == sorted(present, reverse=True)
    kept.close()


def test_a_flipped_byte_is_a_miss(path):
    kept = opened(path)
    write(kept, 8)
    kept.close()
    raw = bytearray(path.read_bytes())
    for at in (2, 5):
        raw[raw.index(block(at).tobytes()) + 100] ^= 1
    path.write_bytes(raw)
    kept = opened(path)
    assert found(kept, 8) == 6
    assert len(kept) == 6
    assert write(kept, 8) == [True] * 8
    assert found(kept, 8) == 8
    kept.close()


def test_another_model_is_refused_by_name_and_replaced_if_asked(path):
    kept = opened(path)
    write(kept, 3)
    kept.close()
    with pytest.raises(ConfigError, match="keep_replace"):
        opened(path, meaning="another")
    kept = opened(path, meaning="another", replace=True)
    assert len(kept) == 0
    kept.close()


def test_the_second_of_two_servers_has_memory_of_its_own(path, caplog):
    first = opened(path)
    write(first, 3)
    second = opened(path)
    assert "starts with a pool of its own" in caplog.text
    assert len(second) == 0
    assert write(second, 8) == [True] * 8
    assert found(second, 8) == 8
    assert found(first, 8) == 3
    assert [*path.parent.iterdir()] == [path]
    second.close()
    first.close()
    assert len(opened(path)) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bytes": 100, "blocks": None}, "a budget of 100 bytes has no room for a block of 3000"),
        ({"bytes": "1MB"}, "one of them wanted"),
        ({"blocks": 1 << 40}, "bytes of memory"),
        ({"bytes": "25%", "blocks": None}, "a share of nothing"),
    ],
)
def test_a_bad_size_is_one_clear_error(path, settings, said):
    with pytest.raises(ConfigError, match=said):
        opened(path, **settings)


def test_a_folder_on_a_disk_is_refused(tmp_path):
    if file_system(tmp_path) in IN_MEMORY:
        pytest.skip("the temporary folder is in memory")
    with pytest.raises(ConfigError, match="which is not memory"):
        opened(tmp_path / "kv")
