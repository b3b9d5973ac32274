"""A server that never ends: its memory does not grow with the requests that it has served.

Each story runs in a separate process, through 64 blocks, and prints its resident memory after a
tenth of the strangers and after all of them.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from serving import one_tier, tokens, two_tiers

from kvtrie import Scope

# Two bytes and a half per stranger of the shorter stories.
MOST = 1 << 18


def tenants():
    """Each request is of a new tenant and adapter."""
    return strangers(lambda at: Scope(tenant=b"tenant %058d" % at, lora=f"adapter {at:056}"))


def digests():
    """Each request has a new image."""
    return strangers(lambda at: Scope(extra=((1, b"image %058d" % at),)))


def strangers(scope):
    manager = one_tier(blocks=64)
    prompt = tokens(2)

    def serve(at):
        lease = manager.acquire(prompt, now=at, scope=scope(at))
        lease.commit(prompt, now=at)
        lease.release(now=at)

    return serve


def failures():
    """Each request's load fails, and no call asks for failures."""
    manager = two_tiers(gpu=64, host=64)
    prompt = tokens(1)

    def serve(at):
        manager.mark(prompt, "host", now=at, present=True)
        lease = manager.acquire(prompt, now=at, load="all", keep=0)
        moves = manager.moves()
        assert len(moves) == 1
        manager.complete(moves.id, now=at, ok=False, error=f"device {at} does not answer")
        lease.release(now=at)

    return serve


STORIES = {story.__name__: story for story in (tenants, digests, failures)}


def resident():
    """Bytes of this process that are in memory."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)


def grown(story, number):
    """Bytes that are resident after all turns beyond those after a tenth of them."""
    run = subprocess.run(
        [sys.executable, __file__, story, str(number)], check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("story", STORIES)
def test_resident_memory_does_not_grow_with_strangers(story):
    assert grown(story, 100_000) < MOST


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("story", STORIES)
def test_resident_memory_does_not_grow_with_a_million_strangers(story):
    assert grown(story, 1_000_000) < MOST


def tell(story, number):
    """Lives a story and prints by how much memory grew in its last nine tenths."""
    serve = STORIES[story]()
    for at in range(1, number + 1):
        serve(at)
        if at == number // 10:
            first = resident()
    sys.stdout.write(f"{resident() - first}\n")


if __name__ == "__main__":
    tell(sys.argv[1], int(sys.argv[2]))
