"""A link to a store that goes down in the middle of calls: two network namespaces, root only.

Invariant: every byte that a request finds is compared. A call on a link that stays down ends by its
deadline or never, so its end proves the deadline and no test measures how long it took. Cost:
seconds, most of them the start of a second pytest in a separate namespace.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
import respserver
from store_calls import SECONDS, StoreCalls, soon
from tests import namespace, partition, store_servers
from tests.remote_requests import request, serving

resp = pytest.importorskip("kvtrie.tiers.remote.resp")
pytest.importorskip("redis")

CALLS = StoreCalls(3, 8 << 20)  # more than the buffers of two sockets
DEADLINE_S = 3.0
PROMPTS = [[seed * 1000 + at for at in range(24)] for seed in range(16)]
inside = pytest.mark.skipif(not namespace.INSIDE, reason="test_a_link_that_goes_down runs it")


@pytest.mark.skipif(namespace.INSIDE, reason="runs the others")
def test_a_link_that_goes_down_and_up():
    if not partition.possible():
        pytest.skip("no two network namespaces: root, unshare, nsenter and ip are needed")
    options = ["-q", "-rf", "-p", "no:cacheprovider", "--show-capture=no"]
    ended = namespace.run("pytest", *options, Path(__file__), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "3 passed" in ended.stdout


@pytest.fixture
def link():
    with partition.Partition() as made:
        yield made


@pytest.fixture
def url(link):
    """A server at the far end."""
    command = [*link.inside, sys.executable, respserver.__file__, link.address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        yield f"redis://{link.address}:{server.stdout.readline().strip()}/0"
        server.stdin.close()


@pytest.fixture
def cut_at(link, monkeypatch):
    """Let the link go down before one of the following sends and receives of this process.

    Returns the deadlines of the sends and receives since then.
    """
    limit = resp._limit

    def arm(wanted):
        calls = []

        def counted(sock, deadline):
            if len(calls) == wanted:
                link.cut()
            calls.append(deadline)
            limit(sock, deadline)

        monkeypatch.setattr(resp, "_limit", counted)
        return calls

    return arm


@inside
@pytest.mark.parametrize("call", [CALLS.get, CALLS.put], ids=["get", "put"])
def test_a_call_in_whose_middle_the_link_goes_down_is_late(url, link, cut_at, call):
    with closing(CALLS.opened(url)) as store:
        assert CALLS.put(store, 0) == CALLS.get(store, 0) == ["ok"]
        cut_at(5)
        wanted = 0 if call == CALLS.get else 1
        began = time.monotonic()
        assert call(store, wanted, deadline=soon(0.5)) == ["late"]
        assert time.monotonic() - began > 0.4
        # A new connection ends too.
        assert set(call(store, wanted, deadline=soon(0.5))) <= {"late", "unreachable"}
        link.join()
        store_servers.until(lambda: CALLS.get(store, 0) == ["ok"])
        assert CALLS.get(store, 1) == ["missing"]
        assert CALLS.put(store, 1) == CALLS.get(store, 1) == ["ok"]


@inside
def test_requests_end_while_the_link_is_down_and_hits_come_back(url, link, cut_at):
    with serving(url, DEADLINE_S, gpu=120, host=120) as writer:
        for tokens in PROMPTS:
            request(writer, tokens)
            writer.drain()
    with serving(url, DEADLINE_S, gpu=120, host=120) as reader:
        breaker = reader.pools[2].breaker
        assert finds(reader, PROMPTS[:4])
        calls = cut_at(3)
        for tokens in PROMPTS[4:8]:
            request(reader, tokens, load="all")
            reader.manager.audit()
        assert breaker.state == "open"
        reached = len(calls)
        assert request(reader, PROMPTS[8]).hit == 0
        assert len(calls) == reached
        link.join()
        minutes = count(1)  # a probe is due at each look, as one may come before the link is up
        breaker._clock = lambda: time.monotonic_ns() + next(minutes) * 60 * SECONDS
        assert finds(reader, PROMPTS[9:])
        assert breaker.state == "closed"
        reader.manager.audit()


def finds(executor, prompts):
    """Whether one of several prompts is found whole; a load may miss its deadline."""
    return any(
        request(executor, tokens, load="all", prefetch_s=60.0).hit == len(tokens)
        for tokens in prompts
    )
