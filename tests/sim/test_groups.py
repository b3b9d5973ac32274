"""Replays of models with several groups of layers: what is found, and what is refused."""

import dataclasses
import json
import re

import numpy as np
import pytest

from kvtrie import BlockManager, ConfigError, LayerGroup, ModelShape, ResumePoints, Tier
from kvtrie.cli import main
from kvtrie.sim.models import MODELS, model_named, without_groups
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.trace import TraceRequest, write_trace
from kvtrie.sim.workloads import agents

TRACE = agents(requests=500)
GIB = 2**30
ROW = 16 * 2 * 128 * 2  # of a layer of Gemma 3


def played(name, room, *, policy="learned", points=1, groups=True):
    model = model_named(name)
    resume = None
    if not groups:
        model = without_groups(model)
    elif model.groups:
        resume = ResumePoints(every=points) if points >= 512 else ResumePoints(newest=points)
    manager = open_manager([Tier("gpu", bytes=room)], policy=policy, model=model, resume=resume)
    figures = replay(TRACE, manager)
    manager.audit()
    return figures


def test_the_models_have_the_sizes_of_their_configurations():
    shapes = {name: model_named(name) for name in MODELS}
    layers = {name: [len(one.layers) for one in shape.groups] for name, shape in shapes.items()}
    assert layers == {
        "gemma-3-27b": [10, 52],
        "gpt-oss-120b": [18, 18],
        "qwen3-next-80b": [12, 36],
        "llama-3.1-8b": [],
    }
    assert shapes["gemma-3-27b"].block_bytes(512, 1) == 52 * 512 * ROW
    state = shapes["qwen3-next-80b"].block_bytes(512, 1) / 36 / 2**20
    assert state == pytest.approx(2.06, abs=0.005)


@pytest.mark.parametrize(("name", "room"), [("gemma-3-27b", 8 * GIB), ("gpt-oss-120b", 2 * GIB)])
def test_windows_find_more_than_all_layers_of_all_tokens(name, room):
    apart, together = played(name, room), played(name, room, policy="lru", groups=False)
    assert apart.token_rate > 1.3 * together.token_rate
    full, windows = apart.groups
    assert full.held_bytes + windows.held_bytes + windows.released_bytes <= room
    assert (full.kind, windows.kind, windows.layers > 0) == ("full", "sliding", True)


def test_states_at_ends_and_branches_find_more_than_states_at_intervals():
    apart = played("qwen3-next-80b", 4 * GIB)
    assert apart.token_rate > played("qwen3-next-80b", 4 * GIB, points=512).token_rate * 1.3


@pytest.mark.parametrize("policy", ["learned", "lru"])
def test_a_tier_below_finds_what_the_first_one_drops(policy):
    model, requests = model_named("gemma-3-27b"), TRACE[:200]
    found = []
    kinds = ("gpu", "host", "disk")
    for rooms in [(6 * GIB,), (6 * GIB, 64 * GIB), (6 * GIB, 6 * GIB, 64 * GIB), (64 * GIB,)]:
        tiers = [Tier(kind, bytes=room) for kind, room in zip(kinds, rooms, strict=False)]
        manager = open_manager(tiers, policy=policy, model=model, resume=ResumePoints())
        found.append(replay(requests, manager))
        manager.audit()
    small, both, three, large = (figures.token_rate for figures in found)
    assert small < both - 0.1
    assert min(both, three) > large - 0.05
    assert found[1].tiers[1].hits > 0
    assert found[2].tiers[2].hits > 0


@pytest.mark.parametrize("policy", BlockManager.policies())
def test_every_policy_keeps_points_in_a_budget(policy):
    assert played("gemma-3-27b", 4 * GIB, policy=policy).token_rate > 0.1


def test_a_model_of_one_group_finds_the_same_by_bytes_as_by_blocks():
    model = model_named("llama-3.1-8b")
    room = 100 * model.block_bytes(512)
    blocks = replay(TRACE, open_manager([Tier("gpu", blocks=100)], model=model))
    assert played("llama-3.1-8b", room) == blocks
    assert blocks.groups == ()


def test_replay_reports_bytes_by_group(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, TRACE)
    given = ["replay", str(path), "--model", "gemma-3-27b", "--tier", "gpu=8GiB"]
    assert main([*given, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    expected = played("gemma-3-27b", 8 * GIB)
    assert figures["token_rate"] == expected.token_rate == figures["tokens_hit"] / figures["tokens"]
    assert figures["groups"] == [dataclasses.asdict(group) for group in expected.groups]
    assert main([*given, "--points", "1024"]) == 0
    assert "sliding           52" in capsys.readouterr().out
    assert main([*given, "--groups", "off", "--policy", "lru", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_rate"] < expected.token_rate


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gemma-4"], "gemma-3-27b, gpt-oss-120b, qwen3-next-80b, llama-3.1-8b"),
        (["--tier", "gpu=8GiB"], "wants --model"),
        (["--model", "gemma-3-27b", "--points", "0"], "--points is 0, at least 1"),
        (["--points", "2"], "go with --model"),
        (["--model", "gemma-3-27b", "--points", "700"], "every 700 tokens, a multiple"),
        (["--model", "qwen3-next-80b", "--groups", "off"], "with states cannot keep"),
        (["--model", "qwen3-next-80b", "--tier", "gpu=99"], "blocks=99: .*wants bytes="),
        (["--model", "gemma-3-27b", "--tier", "gpu=1MiB"], "1048576 bytes, a block .* 41943040"),
        (["--model", "gemma-3-27b", "--tier", "gpu=400MiB"], "1 pages of .*: 2 are wanted"),
    ],
)
def test_replay_refuses_what_it_cannot_play(capsys, tmp_path, arguments, said):
    path = tmp_path / "trace.jsonl"
    write_trace(path, TRACE[:3])
    assert main(["replay", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)


def test_resume_points_are_for_several_groups_without_bytes():
    plain = ModelShape(4, 2, 8)
    mixed = dataclasses.replace(
        plain, groups=(LayerGroup((0, 1)), LayerGroup((2, 3), kind="sliding", window=64))
    )
    gpu, host = (Tier(kind, blocks=40, owner="none") for kind in ("gpu", "host"))
    sliding = dataclasses.replace(plain, groups=(LayerGroup(range(4), kind="sliding", window=64),))
    with pytest.raises(ConfigError, match="one group of kind 'sliding'"):
        BlockManager(sliding, [gpu], resume=ResumePoints())
    # With one group of full attention a request resumes after any block.
    full = dataclasses.replace(plain, groups=(LayerGroup(range(4)),))
    for model in (plain, full):
        assert BlockManager(model, [gpu], resume=ResumePoints()).stats().tiers["gpu"].slots == 40
    remote = Tier("remote", blocks=40)
    named = dataclasses.replace(mixed, fingerprint="of its weights")
    shared = BlockManager(named, [host, remote], resume=ResumePoints())
    assert [slots.held for slots in shared.stats().tiers["remote"].groups] == [0, 0]
    with pytest.raises(ConfigError, match="newest of resume points is 0"):
        ResumePoints(newest=0)
    with pytest.raises(ConfigError, match="resume is 5, a ResumePoints"):
        BlockManager(mixed, [gpu], resume=5)
    turned = dataclasses.replace(mixed, groups=mixed.groups[::-1])
    with pytest.raises(ConfigError, match="first of kind Some"):
        BlockManager(turned, [gpu], resume=ResumePoints())
    manager = BlockManager(mixed, [gpu], resume=ResumePoints())
    # The bytes of 40 blocks of all layers are 80 of two layers.
    assert manager.stats().tiers["gpu"].slots == 80
    groups = manager.stats().as_dict()["tiers"]["gpu"]["groups"]
    assert groups == [{"held": 0, "released": 0}] * 2


def test_a_lease_has_a_table_per_group_and_moves_name_theirs():
    groups = (LayerGroup((0, 1)), LayerGroup((2, 3, 4), kind="sliding", window=5))
    model = ModelShape(5, 2, 8, groups=groups)
    tiers = [Tier("gpu", blocks=8, owner="none"), Tier("host", blocks=40, owner="none")]
    manager = BlockManager(model, tiers, block_tokens=4, policy="lru", resume=ResumePoints())

    def carry(now):
        seen = []
        while moves := list(manager.moves()):
            manager.complete([move.id for move in moves], now=now)
            seen += moves
        return seen

    for now, start in enumerate((0, 100, 200)):
        with manager.acquire(range(start, start + 40), now=now) as lease:
            carry(now)
            lease.commit(range(start, start + 40), now=now)
        carry(now)
    lease = manager.acquire(range(44), load="all", now=9)
    assert lease.matched == 40
    moves = carry(9)
    loads = {(move.group, move.layer_hi) for move in moves if move.dst == 0}
    assert loads == {(0, 2), (1, 3)}
    nothing = 2**32 - 1
    windows = lease.slots("gpu", group=1)
    assert [slot != nothing for slot in windows[:10]] == [False] * 9 + [True]
    assert (lease.slots(0, 0)[:10] != nothing).all()
    assert len(lease.slots("host", 1)) == 10
    with pytest.raises(ConfigError, match="no group 2, the manager keeps 2 apart"):
        lease.slots(group=2)
    counted = manager.stats().tiers["host"].groups
    assert (len(counted), counted[1].held > 0) == (2, True)
    manager.audit()


def several(tmp_path, **more):
    """Settings of four machines that a router of hits chooses among, by events."""
    write_trace(tmp_path / "trace.jsonl", TRACE[:200])
    lines = {
        "trace": '{path="trace.jsonl", format="mooncake"}',
        "model": '{name="gemma-3-27b"}',
        "manager": '{block_tokens=512, policy="learned"}',
        "engine": '{kind="serial"}',
        "cost": '{kind="affine", ns_per_token=1000, alpha=0.0}',
        "machines": 4,
        "router": '{kind="locality"}',
        "directory": '{kind="events", delay_ns=0}',
        "tiers": '[{kind="gpu", bytes="8GiB", write="through"}]',
    } | more
    path = tmp_path / "sim.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
    return path


def test_a_file_names_a_model_and_its_router_learns_of_all_groups(tmp_path, capsys):
    path, found = several(tmp_path), {}
    for directory in ('{kind="events", delay_ns=0}', '{kind="exact"}'):
        assert main(["sim", "run", str(path), "--json", "--set", f"directory={directory}"]) == 0
        found[directory] = json.loads(capsys.readouterr().out)
    first, second = found.values()
    assert first == second
    shape = several(tmp_path, model="{layers=62, kv_heads=16, head_dim=128}")
    assert main(["sim", "run", str(shape), "--json"]) == 0
    together = json.loads(capsys.readouterr().out)
    assert first["hit_tokens"]["gpu"] > 2 * together["hit_tokens"]["gpu"] > 0


def routed(tmp_path, capsys, model, directory):
    """The router's decision for a prompt that leaves a known one amid it.

    Machine 0 has ten blocks of the known prompt and a state after them, machine 1 its first two
    blocks and a state after these; the prompt has five of these blocks.
    """
    path = several(tmp_path, machines=2, model=f'{{name="{model}"}}', directory=directory)
    ids = [[*range(10), 90], [0, 1, 91], [*range(5), 50, 51, 92]]
    requests = [
        TraceRequest(at * 10**6, 512 * len(blocks) - 412, 1, np.array(blocks, dtype=np.uint32))
        for at, blocks in zip((0, 1, 50), ids, strict=True)
    ]
    write_trace(tmp_path / "trace.jsonl", requests)
    given = ["sim", "run", str(path), "--decisions", str(tmp_path / "decisions"), "--best", "1"]
    assert main(given) == 0
    capsys.readouterr()
    *_, last = map(json.loads, (tmp_path / "decisions").read_text().splitlines())
    (other,) = last["best"]
    return [(one["machine"], one["hit_tokens"]) for one in (last, other)]


@pytest.mark.parametrize("directory", ['{kind="events", delay_ns=0}', '{kind="exact"}'])
def test_a_machine_counts_up_to_the_deepest_border_with_all_groups(tmp_path, capsys, directory):
    # Five blocks of machine 0 are of no use: no state is after them.
    assert routed(tmp_path, capsys, "qwen3-next-80b", directory) == [(1, 1024), (0, 0)]
    # With full attention, and with windows that are still there, it has them all.
    for model in ("llama-3.1-8b", "gemma-3-27b"):
        assert routed(tmp_path, capsys, model, directory) == [(0, 2560), (1, 1024)]


def test_a_store_of_one_machine_serves_groups_and_peers_are_refused(tmp_path, capsys):
    rows = '{kind="gpu", bytes="8GiB"}, {kind="host", bytes="8GiB", write="through"}'
    stored = several(tmp_path, tiers=f'[{rows}, {{kind="remote", bytes="64GiB"}}]')
    assert main(["sim", "run", str(stored), "--set", "machines=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_tokens"]["remote"] > 0
    assert main(["sim", "run", str(stored)]) == 2
    assert "machines is 4, and a tier is 'remote'" in capsys.readouterr().err
    asks = several(tmp_path, peers='{lookup="all", bytes_per_s=1_000_000_000}')
    assert main(["sim", "run", str(asks)]) == 2
    assert "blocks of one group of layers, and 2 are kept apart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ('{name="gemma-4"}', "gemma-3-27b, gpt-oss-120b, qwen3-next-80b, llama-3.1-8b"),
        ('{name="gemma-3-27b", layers=2}', "model.name is 'gemma-3-27b', and model has layers"),
        ('{name="gemma-3-27b", groups=[]}', "and model has groups: a model with groups"),
        ("{groups=[]}", "model.name is None, and model has groups"),
        ("{name=5}", "gemma-3-27b"),
    ],
)
def test_a_file_that_names_no_model_is_refused(tmp_path, capsys, model, said):
    assert main(["sim", "run", str(several(tmp_path, model=model))]) == 2
    assert said in capsys.readouterr().err
