"""The back end `folder:` under an executor: blocks of one process found by another, and damage."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvtrie import BlockManager, ConfigError, ModelShape, Tier
from kvtrie.tiers import open_pools
from kvtrie.tiers.remote import RemoteUrl
from kvtrie.tiers.remote.folder import Removed, collect
from kvtrie.transfer import Executor

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=8, fingerprint="folder")
SIZE = 4
PROMPT = list(range(6 * SIZE))


def world(url, *, gpu=8, host=8, write="through", **settings):
    """An executor whose host writes every block to the store at once."""
    tiers = [
        Tier("gpu", blocks=gpu, write=write),
        Tier("host", blocks=host, write=write),
        Tier("remote", blocks=10_000_000, path=url, **settings),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE)
    pools = open_pools(SHAPE, tiers, SIZE)
    return Executor(manager, pools, deadline_s=30.0)


def kv_of(tokens):
    """The KV that a prefill of these tokens gives, as far as a test needs one."""
    generator = torch.Generator().manual_seed(sum(tokens))
    return torch.randn(SHAPE.layers, 2, len(tokens), 2, 8, generator=generator)


def rows(pool, lease, tokens):
    table, at = pool.table(lease.slots(0)), torch.arange(tokens)
    return [(layer[at // SIZE], at % SIZE) for layer in table]


def compute(executor, tokens):
    """Answer a prompt that is not cached, and write it down to the store."""
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0) as lease:
        assert lease.matched == 0
        executor.wait(lease)
        for where, kv in zip(rows(pool, lease, len(tokens)), kv_of(tokens), strict=True):
            pool.scatter(*where, *kv)
        lease.commit(tokens, now=executor.clock())
    executor.drain()


def fetch(executor, tokens):
    """Tokens of a prompt that came from a cache, whose KV is as it was computed."""
    manager, pool = executor.manager, executor.pools[0]
    with manager.acquire(tokens, now=executor.clock(), keep=0, load="all") as lease:
        executor.wait(lease)
        found, want = lease.matched, kv_of(tokens)
        for layer, where in enumerate(rows(pool, lease, found)):
            for kv, at in zip(pool.gather(*where), want[layer], strict=True):
                assert torch.equal(kv, at[:found])
    manager.audit()
    return found


def test_one_process_writes_and_another_finds(tmp_path):
    url = f"folder:{tmp_path}/kv"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_folder_store import PROMPT, compute, world\n"
        f"with world({url!r}) as executor:\n    compute(executor, PROMPT)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with world(url) as executor:
        assert fetch(executor, PROMPT) == 0
        found = executor.prefetch(PROMPT, deadline_s=30.0)
        assert (found.asked, found.found, found.refuted, found.late) == (6, 6, 0, 0)
        executor.drain()
        match = executor.manager.lookup(PROMPT, now=executor.clock(), keep=0)
        assert match.resident("host") == 6
        assert fetch(executor, PROMPT) == len(PROMPT)
        assert executor.pools[2].stats().results == {("exists", "ok"): 6, ("get", "ok"): 6}


def values(folder):
    return sorted(file for file in Path(folder).glob("??/*") if file.is_file())


def flip(file, others):
    del others
    value = bytearray(file.read_bytes())
    value[-1] ^= 1
    file.write_bytes(value)


def cut(file, others):
    del others
    os.truncate(file, file.stat().st_size // 2)


def swap(file, others):
    file.write_bytes(others[0].read_bytes())


def empty(file, others):
    del others
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, cut, swap, empty, lambda file, _: file.unlink()])
def test_a_damaged_value_is_a_miss_and_is_written_again(tmp_path, damage):
    url = f"folder:{tmp_path}/kv"
    with world(url) as executor:
        compute(executor, PROMPT)
    with world(url) as executor:
        storage = executor.pools[2]
        names = storage._names(executor.manager.keys(PROMPT))
        third, fourth = (Path(storage._store._open().path(names[at])) for at in (2, 3))
        executor.prefetch(PROMPT[: 2 * SIZE], deadline_s=30.0)
        executor.drain()
        # The first answer is given before the value is broken.
        storage.find(executor.manager.keys(PROMPT), 2**62)
        damage(third, [fourth])
        found = executor.prefetch(PROMPT, deadline_s=30.0)
        assert found.found == 4
        executor.drain()
        assert fetch(executor, PROMPT) == 2 * SIZE
        lost = storage.stats()
        assert lost.results["get", "damaged" if damage.__name__ != "<lambda>" else "missing"] == 1
        assert lost.refuted == 1
        assert not third.exists()
        assert executor.prefetch(PROMPT, deadline_s=30.0).refuted == 1
    with world(url) as executor:
        assert executor.prefetch(PROMPT, deadline_s=30.0).found == 2


def test_local_eviction_removes_nothing_from_the_store(tmp_path):
    url = f"folder:{tmp_path}/kv"
    tiers = {"gpu": 6, "host": 6}
    with world(url, **tiers) as executor:
        for start in range(5):
            compute(executor, [start * 1000 + token for token in PROMPT])
        match = executor.manager.lookup(PROMPT, now=executor.clock(), keep=0)
        assert match.resident("gpu") == match.resident("host") == 0
        assert len(values(tmp_path / "kv")) == 30


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        world(f"folder:{tmp_path}/kv")


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "kv").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        world(f"folder:{tmp_path}/kv")


def test_gc_removes_expired_values_and_stale_staging_files(tmp_path):
    url = f"folder:{tmp_path}/kv"
    with world(url) as executor:
        compute(executor, PROMPT)
    folder = tmp_path / "kv"
    now = time.time()
    stale, fresh = folder / "staging" / "value-1-1-0", folder / "staging" / "value-2-2-0"
    for file, age in ((stale, 7200), (fresh, 10), (values(folder)[0], 100)):
        if not file.exists():
            file.write_bytes(b"kvtrieV1")
        os.utime(file, (now - age, now - age))
    (folder / "README").write_text("kept")
    size = values(folder)[0].stat().st_size
    plain = RemoteUrl.parse("url", url)
    assert collect(plain, now=now) == Removed(expired=0, staged=1, bytes=8, kept=6)
    found = collect(RemoteUrl.parse("url", f"{url}?ttl=50"), now=now)
    assert (found.expired, found.staged, found.bytes, found.kept) == (1, 0, size, 5)
    assert fresh.exists()
    assert (folder / "README").exists()
    with pytest.raises(ConfigError, match="is no folder"):
        collect(RemoteUrl.parse("url", f"folder:{tmp_path}/none"))


def test_opening_removes_staging_files_of_writers_that_ended(tmp_path):
    staging = tmp_path / "kv" / "staging"
    staging.mkdir(parents=True)
    ended, busy = staging / "value-1-1-0", staging / "value-2-2-0"
    for file, age in ((ended, 7200), (busy, 60)):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    world(f"folder:{tmp_path}/kv").close()
    assert sorted(staging.iterdir()) == [busy]


def foreign_files(folder, outside):
    """Files of others, some days old, where kvtrie has its own or behind a link there."""
    name = "0" * 62
    files = ["staging/thesis.docx", "staging/value-1-2-3", f"ef/{name}", "ef/notes.txt"]
    made = [*(folder / file for file in files), outside / name]
    for file in made:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("not of kvtrie")
        os.utime(file, (0, 0))
    (folder / "ee").symlink_to(outside)
    return made


def test_a_folder_with_files_of_others_is_refused_and_nothing_is_removed(tmp_path):
    folder = tmp_path / "kv"
    made = foreign_files(folder, tmp_path / "outside")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ConfigError, match=f"{folder} has no file kvtrie-values, and kvtrie did not"
    ):
        world(f"folder:{folder}")
    assert sorted(tmp_path.rglob("*")) == before
    assert all(file.read_text() == "not of kvtrie" for file in made)


def test_files_of_others_in_a_store_stay(tmp_path):
    url = f"folder:{tmp_path}/kv"
    with world(url) as executor:
        compute(executor, PROMPT)
    made = foreign_files(tmp_path / "kv", tmp_path / "outside")
    for value in values(tmp_path / "kv"):
        os.utime(value, (0, 0))
    world(url).close()
    found = collect(RemoteUrl.parse("url", f"{url}?ttl=1"))
    assert (found.expired, found.staged) == (6, 0)
    assert all(file.read_text() == "not of kvtrie" for file in made)


def test_a_store_of_an_earlier_version_is_taken_over(tmp_path):
    url, marker = f"folder:{tmp_path}/kv", tmp_path / "kv" / "kvtrie-values"
    with world(url) as executor:
        compute(executor, PROMPT)
    marker.unlink()
    assert collect(RemoteUrl.parse("url", url)).kept == 6
    assert not marker.exists()
    with world(url) as executor:
        assert executor.prefetch(PROMPT, deadline_s=30.0).found == 6
    assert marker.exists()
    marker.write_text("kvtrie folder of values 2\n")
    with pytest.raises(ConfigError, match="this version does not read the folder"):
        world(url)


@contextmanager
def user(number, mask=0o022, group=54321):
    """Another user of a group, for the calls within."""
    before = os.umask(mask)
    os.setegid(group)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
@pytest.mark.parametrize("mode", [0o2777, 0o2770, 0o770])
def test_users_share_a_folder_by_its_mode(mask, mode):
    with tempfile.TemporaryDirectory(dir="/tmp") as top:  # whose folders all users may pass
        Path(top).chmod(0o755)
        folder = Path(top) / "kv"
        folder.mkdir()
        os.chown(folder, 0, 54321)
        folder.chmod(mode)
        prompts = PROMPT, [token + 1 for token in PROMPT]
        for number, prompt in zip((12345, 12346), prompts, strict=True):
            with user(number, mask), world(f"folder:{folder}") as executor:
                compute(executor, prompt)
        with user(12346), world(f"folder:{folder}") as executor:
            for prompt in prompts:
                assert executor.prefetch(prompt, deadline_s=30.0).found == 6
                executor.drain()
                assert fetch(executor, prompt) == len(prompt)
        assert {file.stat().st_gid for file in values(folder)} == {54321}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
def test_a_folder_that_is_not_shared_is_refused_with_its_owner_and_mode():
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        Path(top).chmod(0o777)
        with user(12345), world(f"folder:{top}/kv") as executor:
            compute(executor, PROMPT)
        said = f"{top}/kv/staging belongs to user 12345 and group 54321 with mode 755, and this is"
        with user(12346), pytest.raises(ConfigError, match=f"{said} user 12346.*chmod -R g.rwX"):
            world(f"folder:{top}/kv")


def test_blocks_are_written_ahead_of_need_with_write_back(tmp_path):
    with world(f"folder:{tmp_path}/kv", gpu=8, host=16, write="back") as executor:
        for start in range(6):
            compute(executor, [start * 1000 + token for token in PROMPT])
        assert len(values(tmp_path / "kv")) >= 12
