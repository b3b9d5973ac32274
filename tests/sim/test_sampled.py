"""Shares of other policies and several tiers: samples of sessions, and whole replays."""

import json

import numpy as np
import pytest

from kvtrie import Tier
from kvtrie.cli import main
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.sampled import Sampling, session_names
from kvtrie.sim.trace import TraceRequest
from kvtrie.sim.workloads import FAMILIES

GPU = Tier("gpu", blocks=1, write="never")


def conversations(number=2000, *, named=True):
    """Conversations of two turns that open with one system prompt and return at random."""
    draw = np.random.default_rng(7)
    turns = np.repeat(np.arange(number), 2)
    draw.shuffle(turns)
    seen, requests = set(), []
    for at, chat in enumerate(turns.tolist()):
        size = 6 if chat in seen else 3
        seen.add(chat)
        own = np.arange(10 + 10 * chat, 10 + 10 * chat + size)
        blocks = np.concatenate([[0, 1], own]).astype(np.uint32)
        session = f"{chat}" if named else None
        requests.append(TraceRequest(at * 10**9, 512 * len(blocks), 1, blocks, session))
    return requests


def share(requests, tiers, policy):
    return replay(requests, open_manager(tiers, policy=policy)).hit_rate


@pytest.mark.parametrize("named", [True, False])
def test_a_shared_first_block_does_not_make_one_session(named):
    requests = conversations(named=named)
    names = session_names(requests)
    assert len(set(names)) == 2000
    counts = np.bincount([name % 8 for name in names])
    assert (abs(counts - 500) < 4 * 2 * (2000 * 7 / 64) ** 0.5).all()  # four standard deviations
    chats = [int(one.blocks[2]) for one in requests]
    assert len(set(zip(names, chats, strict=True))) == 2000


@pytest.mark.parametrize(("policy", "host"), [("lru", True), ("learned", False)])
def test_a_sampled_share_is_that_of_the_whole_trace(policy, host):
    requests, capacity = conversations(6000), 12_000
    tiers = (
        [GPU] if not host else [Tier("gpu", blocks=3000, write="through"), Tier("host", blocks=1)]
    )
    point = Sampling(requests, tiers, policy=policy, block_tokens=512).point(capacity)
    last = Tier(tiers[-1].kind, blocks=capacity, write=tiers[-1].write)
    whole = share(requests, [*tiers[:-1], last], policy)
    assert point.one_in == 3
    assert 0 < point.error < 0.01
    # From a third of the requests `learned` learns less.
    assert abs(point.share - whole) < (0.01 if policy == "lru" else 0.03)


def test_a_room_of_few_prompts_is_played_whole():
    requests = FAMILIES["chats"](requests=120)
    capacity = 2 * max(len(one.blocks) for one in requests)
    point = Sampling(requests, [GPU], policy="learned", block_tokens=512).point(capacity)
    assert (point.error, point.one_in) == (0, 1)
    assert point.share == share(requests, [Tier("gpu", blocks=capacity, write="never")], "learned")


def test_the_command_prints_errors(tmp_path, capsys):
    rows = [
        {"timestamp": one.at // 10**6, "input_length": one.input_tokens, "output_length": 1}
        | {"hash_ids": one.blocks.tolist(), "session": one.session}
        for one in conversations(4000)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "sim.toml"
    path.write_text("""
trace = {path="t.jsonl", format="mooncake"}
model = {layers=1, kv_heads=1, head_dim=4, dtype="float16"}
cost = {kind="affine", ns_per_token=1}
tiers = [{kind="gpu", blocks=3000, write="through"}, {kind="host", blocks=300}]
""")
    words = ["sim", "capacities", str(path), "--points", "3"]
    assert main([*words, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["one_in"] for point in points] == [1, 2, 2]
    assert points[-1]["error"] > 0
    assert all(point["hits"] <= point["most_hits"] for point in points)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "learned" in text
    assert "1 in 2" in text
