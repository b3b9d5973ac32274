"""Hits of leaf-only LRU with all capacities in one pass: those of a run with each."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.capacities import BlockPath, lru_curve, paths_of
from kvtrie.sim.config import read_config
from kvtrie.sim.run import run_config

SETTINGS = """
trace = {path="t.jsonl", format="mooncake", output=false}
model = {layers=1, kv_heads=1, head_dim=4, dtype="float16"}
cost = {kind="affine", ns_per_token=1}
manager = {policy="lru"}
tiers = [{kind="gpu", blocks=30, write="never"}]
"""


def drawn(folder, seed):
    """Settings with a trace of 30 requests of four conversations that share their first blocks."""
    dice, names, chats, rows = random.Random(seed), {}, [()] * 4, []
    for at in range(30):
        one = dice.randrange(4)
        chat = chats[one][: dice.randint(0, 6)]
        while len(chat) < dice.randint(1, 6):
            # An id says all up to its block's end.
            chat = (*chat, names.setdefault((chat, dice.randrange(3)), len(names)))
        chats[one] = chat
        row = {"timestamp": at * 1000, "hash_ids": chat, "output_length": dice.choice((1, 600))}
        rows.append({**row, "input_length": 512 * len(chat) - dice.choice((0, 0, 1, 100))})
    return written(folder, rows, SETTINGS)


def written(folder, rows, settings):
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sim.toml").write_text(settings)
    return folder / "sim.toml"


def each_capacity_is_a_run(path, changes):
    curve = lru_curve(paths_of(read_config(path, changes)))
    capacities = range(curve.least, len(curve.found) + 3)
    assert len(capacities) > 5
    hits = []
    for capacity in capacities:
        figures = run_config(read_config(path, [*changes, f"tiers.0.blocks={capacity}"]))
        assert figures["refused"] == 0
        hits.append(figures["tiers"][0]["hits"])
    assert [curve.hits(capacity) for capacity in capacities] == hits
    assert hits[0] < hits[-1]


CHANGES = ((), ("manager.keep=0",), ("trace.output=true", "manager.keep=600"))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "keep=0", "answers"])
def test_one_pass_has_the_hits_of_a_run_with_each_capacity(tmp_path, seed, changes):
    each_capacity_is_a_run(drawn(tmp_path, seed), changes)


@pytest.mark.deep
@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "keep=0", "answers"])
def test_one_pass_has_the_hits_of_many_runs(tmp_path, changes):
    for seed in range(4, 200):
        each_capacity_is_a_run(drawn(tmp_path, seed), changes)


def naive_distances(requests):
    """Each request's distances, from one list of all blocks in the order in which they stay."""
    order, distance = [], {}
    for blocks, findable, room in requests:
        path = [tuple(blocks[: at + 1]) for at in range(len(blocks))]
        yield [(distance[block], len(block) - 1) for block in path[:findable] if block in distance]
        before = len(path) + room
        for block in order:
            before += block not in path[:findable]
            distance[block] = max(distance[block], before)
        order = path + [block for block in order if block not in path]
        distance |= {block: at + 1 for at, block in enumerate(path)}


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 6), st.integers(0, 3)),
    max_size=40,
)


@given(REQUESTS)
def test_distances_are_those_of_one_list(requests):
    names = {}  # an id says all up to its block's end
    paths = []
    for blocks, *more in requests:
        prefixes = [tuple(blocks[: at + 1]) for at in range(len(blocks))]
        ids = [names.setdefault(prefix, 7 * len(names)) for prefix in prefixes]
        paths.append(BlockPath(np.array(ids, np.uint32), *more))
    naive = list(naive_distances(requests))
    capacities = range(max((most for one in naive for most, _ in one), default=0) + 2)
    curve = lru_curve(paths, capacities)
    assert curve.each.tolist() == [
        [sum(most <= capacity for most, _ in one) for capacity in capacities] for one in naive
    ]
    for capacity in capacities:
        found = [at for one in naive for most, at in one if most <= capacity]
        at = min(capacity, len(curve.found) - 1)
        assert (curve.found[at], curve.depths[at]) == (len(found), sum(found))


def test_blocks_of_an_answer_are_found_by_the_next_prompt():
    first = BlockPath(np.array([1], np.uint32), 1, 0, np.array([2], np.uint32))
    again = BlockPath(np.array([1, 2], np.uint32), 2, 0)
    curve = lru_curve([first, again])
    assert (curve.blocks, curve.least, curve.found.tolist()) == (3, 2, [0, 1, 2])


def test_prompts_of_tokens_end_with_a_block(tmp_path):
    dice = random.Random(3)
    chats = [[dice.randrange(9) for _ in range(64)] for _ in range(6)]
    rows = [
        {"arrival_ns": at * 10**6, "tokens": dice.choice(chats)[: 16 * dice.randint(1, 4)]}
        for at in range(60)
    ]
    settings = SETTINGS.replace('format="mooncake", output=false', 'format="tokens"')
    path = written(tmp_path, rows, settings)
    each_capacity_is_a_run(path, ())
    written(tmp_path, [*rows, {"arrival_ns": 10**9, "tokens": [1] * 17}], settings)
    with pytest.raises(ConfigError, match="request 60 has 17 tokens"):
        lru_curve(paths_of(read_config(path)))


def test_too_little_room_is_refused(tmp_path):
    curve = lru_curve(paths_of(read_config(drawn(tmp_path, 0))))
    with pytest.raises(ConfigError, match=f"a request takes {curve.least} blocks"):
        curve.hits(curve.least - 1)


def test_the_command_prints_shares_with_beladys_bound(tmp_path, capsys):
    path = drawn(tmp_path, 1)
    curve = lru_curve(paths_of(read_config(path)))
    assert main(["sim", "capacities", str(path), "--points", "5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["blocks"] == curve.blocks
    points = printed["points"]
    assert [point["capacity"] for point in points] == sorted(
        {point["capacity"] for point in points}
    )
    assert points[0]["capacity"] == curve.least
    for point in points:
        assert point["hits"] == curve.hits(point["capacity"])
        assert point["hits"] <= point["most_hits"]
        # A token has 16 bytes: keys and values of 4 float16 numbers each.
        assert point["gib"] == point["capacity"] * 512 * 16 / 2**30
    assert main(["sim", "capacities", str(path)]) == 0
    assert "LRU" in capsys.readouterr().out
    picture = tmp_path / "hits.png"
    assert main(["sim", "capacities", str(path), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_machines_and_batches_have_no_curve(tmp_path, capsys):
    path = drawn(tmp_path, 0)
    for change, message in (
        ("machines=2", "machines is 2"),
        ("engine.kind=continuous", "engine.kind is 'continuous'"),
    ):
        assert main(["sim", "capacities", str(path), "--set", change]) == 2
        assert message in capsys.readouterr().err
