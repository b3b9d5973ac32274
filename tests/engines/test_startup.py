"""The start-up line of a server, and its warnings."""

from __future__ import annotations

import logging

import pytest

from kvtrie.engines.server.startup import (
    OpenTier,
    grouped,
    log_startup,
    size_text,
    startup_line,
    startup_warnings,
)

HOST = OpenTier("host", 8 << 30, 8192)
DISK = OpenTier("disk", 200 << 30, 204_800, found=84_000, others=1204, path="/kv")


def warned(*tiers, kind="ext4", limit=None, **more):
    """The warnings on a machine with these properties."""
    return startup_warnings(tiers, kind_of=lambda _: kind, limit=lambda: limit, **more)


def test_the_line_has_sizes_in_bytes_and_tokens():
    assert startup_line([HOST, DISK], block_tokens=16, ranks=2, policy="learned") == (
        "kvtrie: host 8.0 GiB (2 x 4.0 GiB) = 131 072 tokens; disk 200 GiB (2 x 100 GiB) = 3.3 M "
        "tokens, 41 % filled by an earlier run (1 204 blocks of another model ignored); block 16 "
        "tokens; 2 ranks; policy learned"
    )


def test_the_line_names_a_shared_store_without_its_password():
    store = OpenTier("remote", 1 << 40, 10_000_000, path="redis://u:hidden@host/0")
    line = startup_line([HOST, store], block_tokens=16, policy="lru")
    assert "= 131 072 tokens; remote redis://u:***@host/0; block 16 tokens" in line
    assert not warned(HOST, store, kind="nfs4")


def test_the_line_of_one_rank_and_an_empty_disk():
    disk = OpenTier("disk", 1 << 20, 10, path="/kv")
    assert startup_line([HOST, disk], block_tokens=16, policy="lru") == (
        "kvtrie: host 8.0 GiB = 131 072 tokens; disk 1.0 MiB = 160 tokens, 0 % filled by an "
        "earlier run; block 16 tokens; 1 rank; policy lru"
    )


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 70, "1048576 PiB")]
)
def test_sizes(size, text):
    assert size_text(size) == text


def test_numbers_are_grouped():
    assert [grouped(at) for at in (0, 999, 1000, 1234567)] == ["0", "999", "1 000", "1 234 567"]


def test_a_sound_machine_has_no_warnings():
    assert not warned(HOST, DISK, gpu_blocks=8192)
    assert not warned(HOST, limit=0)  # its memory is not locked


def test_a_host_tier_below_a_larger_gpu_cache_is_named_with_the_size_it_needs():
    (warning,) = warned(HOST, DISK, gpu_blocks=16_384)
    assert "8 192 blocks and the GPU cache 16 384" in warning
    assert warning.endswith("more than 16.0 GiB wanted")


@pytest.mark.parametrize(
    ("kind", "message"), [("tmpfs", "take memory"), ("nfs4", "on the network")]
)
def test_a_disk_that_is_none(kind, message):
    (line,) = warned(HOST, DISK, kind=kind)
    assert f"/kv is on {kind}" in line
    assert message in line


def test_a_limit_of_locked_memory_below_the_host_tier():
    pinned = OpenTier("host", 8 << 30, 8192, pinned=True)
    (warning,) = warned(pinned, limit=8 << 20)
    assert warning.startswith(
        "the limit of locked memory is 8.0 MiB, below the host tier of 8.0 GiB"
    )
    assert not warned(pinned, limit=8 << 30)


def test_each_line_is_logged_once(caplog):
    log = logging.getLogger("kvtrie.test")
    with caplog.at_level(logging.INFO):
        log_startup(log, "kvtrie: host", ["one", "two"])
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert levels == [
        ("INFO", "kvtrie: host"),
        ("WARNING", "kvtrie: one"),
        ("WARNING", "kvtrie: two"),
    ]
