"""Servers whose host memory is a file: killed, raced, damaged, and started with other weights."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import servers
from servers import BLOCK, prompt, same, serve
from vllm_processes import Process

from kvtrie._kvtrie import KeptFile
from kvtrie.errors import ConfigError

MEMORY = Path("/dev/shm")  # noqa: S108 - the file system under test
PROMPTS = [prompt(seed, 200) for seed in range(3)]
WHOLE = 3 * 6 * BLOCK
BLOCKS = 64
BLOCK_BYTES = 4 * 2 * BLOCK * 2 * 32 * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model):
    with serve(model) as server:
        return server.answers(PROMPTS)


@pytest.fixture
def path():
    folder = Path(tempfile.mkdtemp(dir=MEMORY, prefix="kvtrie-test-"))
    yield folder / "pool"
    shutil.rmtree(folder)


def kept(path, **more):
    return {"tiers": [{"kind": "host", "blocks": BLOCKS, "keep": str(path), **more}]}


@pytest.mark.since("0.32")
@pytest.mark.parametrize(
    ("made", "more"), [(servers.tiny_gemma, {}), (servers.tiny_qwen, servers.STATES)]
)
def test_the_next_server_finds_windows_and_states(tmp_path, path, made, more):
    folder, prompts = made(tmp_path), [prompt(seed, 1300 if more else 200) for seed in range(3)]
    extra = {"tiers": [{"kind": "host", "bytes": "64MB", "keep": str(path)}]}
    right = []
    with serve(folder, extra, **more) as server:
        whole = (len(prompts[0]) - 1) // server.core.scheduler.block_size
        for each in prompts:
            server.answers([each])
            server.wait_for_stores()
            server.forget()
            right += server.answers([each], tokens=20)
            server.wait_for_stores()
    for _ in range(2):
        with serve(folder, extra, **more) as server:
            for each, wanted in zip(prompts, right, strict=True):
                assert server.answers([each], tokens=20) == [wanted]
                assert server.found == whole * server.core.scheduler.block_size
                server.wait_for_stores()
            server.check()


def sealed(path, count):
    """Wait until blocks are sealed; their number."""
    until = time.monotonic() + 60
    while (found := KeptFile.inspect(path).sealed) < count:
        assert time.monotonic() < until, found
    return found


def test_a_killed_server_leaves_its_blocks_to_the_next_one(model, wanted, tmp_path, path):
    first = Process(tmp_path, model, kept(path))
    answers, cached = first.ask(PROMPTS)
    same(answers, wanted)
    assert cached == 0
    sealed(path, WHOLE // BLOCK)
    second = Process(tmp_path, model, kept(path))  # while the first one has the file
    answers, cached = second.ask(PROMPTS)
    same(answers, wanted)
    assert cached == 0
    second.kill()
    assert first.ask(PROMPTS)[1] == WHOLE
    first.kill()
    third = Process(tmp_path, model, kept(path))
    answers, cached = third.ask(PROMPTS)
    same(answers, wanted)
    assert cached == WHOLE
    third.kill()
    whole = bytearray(path.read_bytes())
    pool = len(whole) - BLOCKS * BLOCK_BYTES
    for at in range(pool + 7, len(whole), BLOCK_BYTES):
        whole[at] ^= 8
    with path.open("r+b") as file:
        file.write(whole)
    fourth = Process(tmp_path, model, kept(path))
    answers, cached = fourth.ask(PROMPTS)
    same(answers, wanted)
    assert cached == 0
    fourth.end()


def test_other_weights_are_refused_or_a_cold_start(model, wanted, tmp_path, path):
    with serve(model, kept(path)) as server:
        same(server.answers(PROMPTS), wanted)
        server.wait_for_stores()
    with serve(model, kept(path)) as server:
        same(server.answers(PROMPTS), wanted)
        assert server.found == WHOLE
        assert server.kv_scheduler.reports.kept_blocks == {0: WHOLE // BLOCK}
        server.check()
    other = retrained(model, tmp_path / "other")
    with serve(other) as server:
        right = server.answers(PROMPTS)
    with pytest.raises(ConfigError, match="keep_replace=True"), serve(other, kept(path)):
        pass
    with serve(other, kept(path, keep_replace=True)) as server:
        same(server.answers(PROMPTS), right)
        assert server.found == 0
        server.check()


def retrained(model, folder):
    """The model with one weight changed."""
    import torch
    from transformers import LlamaForCausalLM

    other = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[0] += 0.5
    other.save_pretrained(folder)
    return str(folder)


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_servers_that_are_killed_while_they_answer(model, tmp_path, path):
    """Kill servers at random points; every sealed block is found, and no token differs."""
    kills, draw = 50, random.Random(0)
    asked = [prompt(seed, 200) for seed in range(8)]
    with serve(model) as server:
        right = server.answers(asked)
    counts = {"kills": 0, "sealed": 0, "found": 0, "lost": 0}
    until = time.monotonic() + 3000
    before = 0
    for kill in range(kills):
        if time.monotonic() > until:
            break
        process = Process(tmp_path, model, kept(path))
        order = draw.sample(range(8), 3)
        answers, _ = process.ask([asked[at] for at in order])
        same(answers, [right[at] for at in order])
        known = KeptFile.inspect(path).sealed
        assert known >= before
        process.child.stdin.write(json.dumps([asked[at] for at in draw.sample(range(8), 3)]) + "\n")
        process.child.stdin.flush()
        end = time.monotonic() + draw.random() * 0.3
        while time.monotonic() < end:  # the kill falls at a random point of the work
            before = KeptFile.inspect(path).sealed
        process.kill()
        found = KeptFile.inspect(path).sealed
        counts["kills"], counts["sealed"] = kill + 1, counts["sealed"] + before
        counts["found"] += min(found, before)
        before = 0
    sys.stdout.write(json.dumps(counts) + "\n")
    assert counts["found"] >= 0.99 * counts["sealed"] > 0
