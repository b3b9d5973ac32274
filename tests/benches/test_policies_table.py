"""The policies' table: the common trace as ids, means, goals."""

import numpy as np

from benches.policies.cells import LEAVES, Job, Row, play
from benches.policies.goals import Figures, goals_of
from benches.policies.traces import COMMON, Source, common, rooms_of, sources
from benches.workload import BLOCK, SEED, Trace


def test_equal_ids_of_the_common_trace_are_equal_prefixes():
    requests = common(0, 150)
    known = {}
    for request, (_, prompt, tokens) in zip(requests, Trace(SEED, 30), strict=True):
        path = np.concatenate([request.blocks, request.answer]).tolist()
        assert len(path) == len(tokens) // BLOCK
        assert len(request.blocks) == prompt // BLOCK
        for at, block in enumerate(path):
            prefix = tokens[: BLOCK * (at + 1)].tobytes()
            assert known.setdefault(prefix, block) == block
    assert len(set(known.values())) == len(known)


def test_files_that_are_not_there_have_no_rows():
    names = [source.name for source in sources(None, None, 2, 50)]
    assert names == [name for name in ("chats", "agents", "shared", "flood", COMMON) for _ in "ab"]


def test_seeds_share_their_rooms_and_a_cell_is_played():
    made = [Source("chats", None, seed, 60) for seed in range(2)]
    assert rooms_of(made[0]) == rooms_of(made[1])
    room = rooms_of(made[0])[-1]
    rows = {
        policy: play(Job(made[0], room, "leaf-only", 1, policy))
        for policy in ("lru", "learned, hits", LEAVES)
    }
    assert 0 < rows["lru"].hits <= 100
    assert rows[LEAVES].hits >= rows["lru"].hits
    assert play(Job(made[0], room, "holes", 2, "flat")).hits >= rows["lru"].hits


def row(policy, trace, room, cost, hits=50.0, seed=0):
    return Row(trace, seed, room, "leaf-only", 1, policy, cost, hits)


def test_goals_are_of_means_over_traces_and_of_the_worst_row():
    rows = [
        row("lru", "chats", 10, 40.0),
        row("lru", COMMON, 30_000, 50.0),
        row("flat", "chats", 10, 42.0),
        row("flat", COMMON, 30_000, 49.0),
        row("learned", "chats", 10, 41.0),
        row("learned", "chats", 10, 40.0, seed=1),
        row("learned", COMMON, 30_000, 60.0),
    ]
    figures = Figures(rows, "leaf-only", 1)
    assert figures.cell("learned", ("chats", 10)) == (40.5, 50.0)
    assert figures.mean("learned") == (50.25, 50.0)
    goals = {goal.what: goal for goal in goals_of(rows)}
    worst = goals["worst row - max(lru, flat)"]
    assert (worst.reached, worst.ok, worst.where) == (-1.5, False, "chats, 10 blocks")
    assert goals["mean - lru"].reached == 5.25
    assert goals["common, 30 000 - lru"].ok
