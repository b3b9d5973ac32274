"""The common trace: the same for everybody, and what it is said to be."""

import subprocess
import sys

import numpy as np

from benches.policies.cells import LEAVES, Job, play
from benches.policies.traces import COMMON, Source, common, rooms_of, sources
from benches.workload import BLOCK, SEED, SYSTEM_TOKENS, Trace


def test_the_default_trace_is_the_published_one():
    trace = Trace()
    blocks = [(SYSTEM_TOKENS + ask) // BLOCK for _, ask, _ in trace.order]
    assert (len(trace), sum(blocks)) == (50_031, 4_788_715)
    assert round(sum(blocks) / len(trace), 1) == 95.7


def test_the_same_seed_gives_the_same_requests():
    one, two, other = (Trace(seed, 30) for seed in (5, 5, 6))
    assert one.order == two.order != other.order
    for (c, prompt, tokens), (d, other_prompt, same) in zip(one, two, strict=True):
        assert (c, prompt) == (d, other_prompt)
        assert np.array_equal(tokens, same)


def test_a_conversation_grows_behind_its_system_prompt():
    trace, before = Trace(7, 100), {}
    for c, prompt, tokens in trace:
        assert tokens.dtype == np.int32
        assert SYSTEM_TOKENS < prompt < len(tokens)
        assert np.array_equal(tokens[:SYSTEM_TOKENS], trace.system[trace.prompt_of[c]])
        past = before.get(c, tokens[:SYSTEM_TOKENS])
        assert len(past) < prompt
        assert np.array_equal(tokens[: len(past)], past)
        before[c] = tokens
    assert len(before) == 100


def test_a_peer_needs_numpy_alone():
    code = (
        "import sys; import benches.workload, benches.measure; "
        "print({'kvtrie', 'torch', 'rich'} & sys.modules.keys())"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "set()"


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
