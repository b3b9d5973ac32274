"""Generators: segments and conversations have their ratios and means; clients wait for answers."""

from itertools import pairwise

import pytest

from kvtrie.errors import ConfigError
from kvtrie.sim.arrivals import Arrivals
from kvtrie.sim.config import read_config
from kvtrie.sim.requests import block_requests, trace_requests
from kvtrie.sim.run import run_config
from kvtrie.sim.workloads import FAMILIES
from kvtrie.sim.workloads.segments import Segments
from kvtrie.sim.workloads.sharegpt import ShareGptLike

NAMES = sorted(FAMILIES)


def made_rows(generator, block=16, seed=0):
    return [(at, tokens.tolist(), *rest) for at, tokens, *rest in generator.made(block, seed)]


@pytest.mark.parametrize("generator", [Segments(requests=200), ShareGptLike(requests=200)])
def test_a_generator_is_its_seed(generator):
    made = made_rows(generator, seed=3)
    assert len(made) == 200
    assert made == made_rows(generator, seed=3)
    assert made != made_rows(generator, seed=4)
    assert all(a[0] <= b[0] for a, b in pairwise(made))


@pytest.mark.parametrize("selection", ["uniform", "recent", "popular"])
@pytest.mark.parametrize(("reuse", "prefix"), [(0, 0.5), (0.5, 0.5), (0.75, 1), (1, 0.5), (1, 1)])
def test_segments_have_the_ratios(selection, reuse, prefix):
    parts = 512 // 16
    generator = Segments(
        requests=300, reuse_ratio=reuse, prefix_ratio=prefix, request_selection=selection
    )
    made = [tokens[::parts] for _, tokens, *_ in made_rows(generator)]
    seen = set()
    fronts, reused = [], []
    paths = set()
    for number, ids in enumerate(made):
        assert len(ids) == 8
        assert len(set(ids)) == 8
        if number:
            reused.append(sum(block in seen for block in ids) / 8)
            fronts.append(max(n for n in range(9) if n == 0 or tuple(ids[:n]) in paths) / 8)
        seen.update(ids)
        paths.update(tuple(ids[:n]) for n in range(1, 9))
    assert set(reused) == {reuse}
    if reuse < 1:
        assert set(fronts) == {reuse * prefix}
    elif prefix == 1:
        assert set(fronts) == {1}


def test_a_choice_of_prompts_follows_its_law():
    def ages(selection):
        generator = Segments(
            requests=3000,
            prompt_tokens=32,
            segment_length=16,
            prefix_ratio=0,
            request_selection=selection,
            window=100,
        )
        new = {}  # segment: the prompt that had it first
        for number, (_, ids, *_) in enumerate(made_rows(generator)):
            # One that is older than all prompts held was taken from one that took it.
            if number and new[ids[1]] >= number - 100:
                yield number - new[ids[1]]
            for segment in ids:
                new.setdefault(segment, number)

    recent = list(ages("recent"))
    assert sum(age == 1 for age in recent) / len(recent) > 0.2
    assert sum(recent) / len(recent) < 6
    uniform = list(ages("uniform"))
    assert sum(age == 1 for age in uniform) / len(uniform) < 0.05
    assert sum(uniform) / len(uniform) > 30


def test_conversations_have_the_means():
    generator = ShareGptLike(requests=30_000, think_s=0)
    sessions = {}
    for at, tokens, prompt, answer, session in generator.made(16, 0):
        sessions.setdefault(session, []).append((at, tokens, prompt, answer))
    whole = list(sessions.values())[:4000]  # the last ones are cut off
    assert sum(map(len, whole)) / len(whole) == pytest.approx(5.56, rel=0.05)
    inputs, answers = [], []
    for turns in whole:
        before = 0
        for _, tokens, prompt, answer in turns:
            assert len(tokens) == -(-prompt // 16)
            inputs.append(prompt - before)
            answers.append(answer)
            before = prompt + answer
        for (_, earlier, prompt, _), (_, later, _, _) in pairwise(turns):
            assert later[: prompt // 16].tolist() == earlier[: prompt // 16].tolist()
    assert sum(inputs) / len(inputs) == pytest.approx(37.8, rel=0.05)
    assert sum(answers) / len(answers) == pytest.approx(204.6, rel=0.05)


@pytest.mark.parametrize("name", [*NAMES, "segments", "sharegpt-like"])
def test_a_generator_is_a_trace_of_the_simulator(tmp_path, name):
    config = tmp_path / "sim.toml"
    config.write_text(
        f'seed = 5\ntrace = {{format="{name}", requests=40}}\n'
        'model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}\n'
        'tiers = [{kind="gpu", blocks=4000}]\n'
    )
    lines = []
    figures = run_config(read_config(config), lines.append)
    assert figures["requests"] == len(lines) == 40
    assert not figures["refused"]
    if name in NAMES:
        made = FAMILIES[name](requests=40, seed=5)
        assert [line["arrival_ns"] for line in lines] == [request.at for request in made]
        half = read_config(config, ["manager.block_tokens=256"])
        for one, request in zip(trace_requests(half.trace, 256), made, strict=True):
            assert one[1][::2].tolist() == (2 * request.blocks).tolist()
    other = read_config(config, ["seed=6"])
    assert run_config(other)["ttft_ns"] != figures["ttft_ns"]


@pytest.mark.deep
def test_a_million_turns_are_made_in_bounded_memory():
    import tracemalloc

    tracemalloc.start()
    made = ShareGptLike(requests=10**6, arrivals=Arrivals(per_s=10)).made(16, 0)
    assert sum(1 for _ in made) == 10**6
    assert tracemalloc.get_traced_memory()[1] < 400 << 20
    tracemalloc.stop()


CLOSED = """
seed = 5
trace = {format="sharegpt-like", requests=300, think_s=1, arrivals={kind="closed", clients=6}}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
cost = {kind="affine", ns_per_token=1000000}
tiers = [{kind="gpu", blocks=4000}]
"""


def closed(tmp_path, *changes):
    """The lines of a run by clients, and what it is asked, in the order of the generator."""
    path = tmp_path / "closed.toml"
    path.write_text(CLOSED)
    config, lines = read_config(path, changes), []
    figures = run_config(config, lines.append)
    assert figures["requests"] == len(lines) == 300
    return lines, list(trace_requests(config.trace, 16))


def test_a_client_thinks_after_the_answer_has_ended(tmp_path):
    lines, rows = closed(tmp_path, "trace.arrivals.clients=1")
    ended = 0
    # A single client asks in the order of the trace.
    for line, (think, _, prompt, *_) in zip(lines, rows, strict=True):
        assert line["arrival_ns"] == ended + think
        assert sum(line["hit_tokens"].values()) + line["computed_tokens"] == prompt
        ended = line["end_ns"]
    assert sum(think for think, *_ in rows) / 300 == pytest.approx(1e9, rel=0.2)


@pytest.mark.parametrize("engine", ["serial", "continuous"])
def test_clients_wait_for_each_other_only_in_the_machine(tmp_path, engine):
    lines, _ = closed(tmp_path, f"engine.kind={engine}")
    assert lines == closed(tmp_path, f"engine.kind={engine}")[0]
    for line in lines:
        at = line["arrival_ns"]
        assert sum(o["arrival_ns"] <= at < o["end_ns"] for o in lines) <= 6
    waits = [line["first_token_ns"] - line["arrival_ns"] for line in lines]
    one_client = [
        line["first_token_ns"] - line["arrival_ns"]
        for line in closed(tmp_path, f"engine.kind={engine}", "trace.arrivals.clients=1")[0]
    ]
    assert sum(waits) > sum(one_client)


def test_clients_request_segments(tmp_path):
    made = "trace={format='segments', requests=300, think_s=0, prompt_tokens=64, segment_length=16"
    lines, _ = closed(tmp_path, f"{made}, arrivals={{kind='closed', clients=2}}}}")
    ends = sorted(line["end_ns"] for line in lines)
    # Two come at once, then one with each answer that ends.
    assert [line["arrival_ns"] for line in lines] == [0, 0, *ends[:298]]


def test_what_only_a_run_orders_is_not_replayed(tmp_path):
    path = tmp_path / "closed.toml"
    path.write_text(CLOSED)
    config = read_config(path)
    with pytest.raises(ConfigError, match='kind is "closed"'):
        next(block_requests(config.trace, 16))
    with pytest.raises(ConfigError, match=r"trace.arrivals: clients is 0"):
        read_config(path, ["trace.arrivals.clients=0"])
