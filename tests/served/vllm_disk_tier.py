"""The disk tier below vLLM's own host tier: a restart, damaged files, a failing device."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import servers
from servers import BLOCK, prompt, same

pytestmark = pytest.mark.since("0.31")

PROMPTS = [prompt(seed, 200) for seed in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model):
    with servers.serve(model) as server:
        return server.answers(PROMPTS)


def run_idle_steps(server):
    for _ in range(400):
        server.llm.llm_engine.step()


def ask(server, which):
    """Answers one by one, and how many of their tokens came from below."""
    found, answers = 0, []
    for at in which:
        answers += server.answers([PROMPTS[at]])
        run_idle_steps(server)
        server.forget()
        found += server.found
    return answers, found


def test_host_and_disk_and_a_restart(model, wanted, tmp_path):
    found = []
    for _ in range(2):
        with servers.offload(model, servers.offloading(tmp_path, chunks=8)) as server:
            for _ in range(2):
                answers, tokens = ask(server, range(5))
                same(answers, wanted)
                found.append(tokens)
            assert len(server.disk) >= 5 * 6
    first, again, restarted, _ = found
    assert first == 0
    assert again >= 4 * 6 * BLOCK
    assert restarted >= 5 * 5 * BLOCK


def test_a_damaged_disk_is_a_miss_and_fails_no_request(model, wanted, tmp_path):
    with servers.offload(model, servers.offloading(tmp_path, chunks=8)) as server:
        ask(server, range(5))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 65536:
            flip(path)
    with servers.offload(model, servers.offloading(tmp_path, chunks=8)) as server:
        answers, _ = ask(server, range(5))
        same(answers, wanted)


def flip(path):
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) // 3, len(raw), 65536):
        raw[at] ^= 1
    path.write_bytes(raw)


def test_a_disk_tiers_failing_files_are_a_miss():
    from kvtrie.engines.server.boundary import Boundary
    from kvtrie.engines.vllm.disk_tier import KvtrieDiskTier

    tier = object.__new__(KvtrieDiskTier)  # without files: each use of them raises
    tier.boundary = Boundary("kvtrie", logging.getLogger("vllm.kvtrie"))
    context = SimpleNamespace(req_id="a")
    assert tier.lookup(b"key", context).name == "MISS"
    tier.touch([b"key"], context)
    assert tier.boundary.failures == 2
