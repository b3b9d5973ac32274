"""vLLM servers over one Valkey server, which stalls and ends under load."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import servers
from servers import BLOCK, prompt, same, serve
from vllm_processes import Process

from kvtrie.tiers.remote import RemoteStorage

sys.path.append(str(Path(__file__).parents[2]))
from tests import store_servers

pytest.importorskip("redis", reason="no client of Redis: make engines")

PROMPTS = [prompt(seed, 200) for seed in range(4)]
FULL = 200 // BLOCK * BLOCK
DEADLINE_S = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model):
    """Answers of a server without us, and the seconds that they took."""
    with serve(model) as server:
        server.answers([prompt(9, 200)])
        start = time.monotonic()
        return server.answers(PROMPTS), time.monotonic() - start


def shared(port, **more):
    """Settings of a server over host memory and the store."""
    url = f"redis://127.0.0.1:{port}/0"
    tiers = [{"kind": "host", "blocks": 64}, {"kind": "remote", "path": url}]
    return {"tiers": tiers, "deadline_s": DEADLINE_S, "lookup_s": 2.0, **more}


def test_the_second_server_finds_the_full_blocks_of_the_first(model, wanted, tmp_path):
    with store_servers.valkey(tmp_path / "valkey") as store:
        both = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            both.append(Process(tmp_path / name, model, shared(store.port)))
        one, two = both
        for server, cached in ((one, 0), (two, FULL)):
            for each, right in zip(PROMPTS, wanted[0], strict=True):
                answers, found = server.ask([each])
                same(answers, [right])
                assert found == cached
        assert one.tokens.get("remote", 0) == 0
        assert two.tokens["remote"] == FULL * len(PROMPTS)
        for server in both:
            server.end()


@pytest.mark.parametrize("fault", ["pause", "kill"])
def test_requests_end_in_time_when_the_store_stalls_or_ends(
    model, wanted, tmp_path, monkeypatch, fault
):
    answers, plain_s = wanted
    with store_servers.valkey(tmp_path) as store:
        with serve(model, shared(store.port)) as server:
            same(server.answers(PROMPTS), answers)
            server.wait_for_stores()
        read = RemoteStorage.read_many

        def broken(self, blocks, **more):
            """The store answers what it has, and stalls or ends before the first read."""
            getattr(store, fault)()
            return read(self, blocks, **more)

        monkeypatch.setattr(RemoteStorage, "read_many", broken)
        with serve(model, shared(store.port)) as server:
            server.answers([prompt(9, 200)])
            start = time.monotonic()
            same(server.answers(PROMPTS), answers)
            took = time.monotonic() - start
            lost = server.kv_scheduler.cache.counters.lost
            assert server.kv_scheduler.cache.counters.tokens["remote"] == 0
            assert took < DEADLINE_S + 2 * plain_s + 0.5, (took, plain_s, lost)
            assert lost["store get: late"] + lost["store get: unreachable"] > 0
            more = time.monotonic()
            same(server.answers([prompt(8, 200)]), server.answers([prompt(8, 200)]))
            assert time.monotonic() - more < DEADLINE_S + 2 * plain_s + 0.5
        store.kill()
