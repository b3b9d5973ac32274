"""Sizes worth their price, and prefill times of measured passes."""

import json

import numpy as np
import pytest

from kvtrie import Lane, ModelShape
from kvtrie.advise.advice import Question, advise
from kvtrie.advise.predict import Setting, play, play_lru
from kvtrie.advise.prefill import seconds
from kvtrie.advise.server_metrics import Traffic
from kvtrie.advise.worth import bend
from kvtrie.cli import main
from kvtrie.sim.passes import Passes
from kvtrie.sim.workloads import FAMILIES

SIZE = 512
MODEL = ModelShape(layers=1, kv_heads=1, head_dim=256, dtype="bfloat16")
BLOCK = MODEL.block_bytes(SIZE)
BASE_NS, TOKEN_NS, CONTEXT_NS = 300e6, 1e6, 100.0
FAST = (Lane("host", 1e15), Lane("disk", 1e15))


def passes():
    """Steps of 0.3 s and 1 ms per token, and 0.1 µs more per token of context."""
    contexts, counts = [0, 4096, 16384], [1, 512, 2048]
    ns = [[BASE_NS + n * (TOKEN_NS + CONTEXT_NS * at) for n in counts] for at in contexts]
    return Passes.of(BASE_NS, (contexts, counts, np.array(ns)), ([0], [1], np.array([[BASE_NS]])))


def taken(found, prompt):
    """Seconds of such steps of at most 2048 tokens."""
    total = 0.0
    while found < prompt:
        tokens = min(2048, prompt - found)
        total += BASE_NS + tokens * (TOKEN_NS + CONTEXT_NS * found)
        found += tokens
    return total / 1e9


@pytest.mark.parametrize(("found", "prompt"), [(0, 512), (0, 5000), (4096, 4608), (9000, 30_000)])
def test_a_prefill_takes_the_measured_steps(found, prompt):
    timed = seconds(passes(), np.array([found]), np.array([prompt]))
    assert timed == pytest.approx([taken(found, prompt)], rel=1e-6)
    assert seconds(passes(), np.array([prompt]), np.array([prompt])) == 0


def agents():
    """Agents whose calls compute little after what a cache has."""
    return [one for one in FAMILIES["agents"](requests=400) if one.input_tokens >= SIZE]


@pytest.mark.parametrize("name", ["agents", "chats"])
def test_one_pass_of_lru_finds_what_replays_find(name):
    requests = FAMILIES[name](requests=300)
    longest = max(len(one.blocks) for one in requests)
    gpu = 4 * longest
    settings = [
        Setting(blocks * BLOCK, host * BLOCK, disk * BLOCK)
        for blocks, host, disk in (
            *((gpu, 0, 0), (gpu, gpu // 2, 0), (gpu, 3 * gpu, 0)),
            *((gpu, 2 * gpu, 8 * gpu), (gpu, 2 * gpu, 2 * gpu), (longest - 1, 0, 0)),
        )
    ]
    given = {"model": MODEL, "block_tokens": SIZE, "since": requests[100].at}
    found = play_lru(requests, settings, **given)
    assert settings[-1] not in found  # some requests do not fit
    for setting in settings[:-1]:
        played = play(requests, setting, **given)
        tokens = played.prompt.sum()
        assert (found[setting].prompt == played.prompt).all()
        # What a host demotes late reaches the disk late.
        within = 0.01 if setting.disk else 0.001
        one, other = (each.found.sum() / tokens for each in (found[setting], played))
        assert one == pytest.approx(other, abs=within)
    assert found[settings[2]].found.sum() > found[settings[0]].found.sum()


def asked(requests, **more):
    longest = max(len(one.blocks) for one in requests)
    hosts = [longest * BLOCK * count for count in (4, 16, 64)]
    base = {"gpu": 2 * longest * BLOCK, "hosts": hosts, "disk": 0, "lanes": FAST}
    return Question(MODEL, SIZE, **(base | more))


def test_times_of_passes_are_right_where_a_mean_per_token_is_not():
    requests = agents()
    question = asked(requests, passes=passes(), policies=("lru",))
    answer = advise(lambda: requests, question)
    since = answer.window.since
    given = {"model": MODEL, "block_tokens": SIZE, "since": since}
    row, setting = answer.rows[-1], Setting(question.gpu, question.hosts[-1])
    played = play(requests, setting, **given)
    both = [
        sum(taken(*pair) for pair in zip(tokens.tolist(), played.prompt.tolist(), strict=True))
        for tokens in (played.found[:, 0], played.found.sum(axis=1))
    ]
    saved = 1 - both[1] / both[0]
    assert row.saved == pytest.approx(saved, abs=0.001)
    computed = float((played.prompt - played.found[:, 0]).sum())
    traffic = Traffic(1e6, 0.0, both[0] / computed)
    mean = advise(lambda: requests, asked(requests, traffic=traffic, policies=("lru",))).rows[-1]
    assert mean.saved > saved + 0.05
    # Metrics scale the times of a profile, and leave the share.
    slower = Traffic(1e6, 0.0, 3 * both[0] / computed)
    scaled = advise(lambda: requests, asked(requests, traffic=slower, passes=passes())).rows[2]
    assert scaled.saved == pytest.approx(row.saved, abs=1e-6)
    assert scaled.ttft_mean_s == pytest.approx(3 * row.ttft_mean_s, rel=1e-6)


def test_each_size_has_what_its_bytes_add():
    requests = agents()
    answer = advise(lambda: requests, asked(requests, disk=200_000 * BLOCK))
    steps = {(one.policy, one.host, bool(one.disk)): one for one in answer.worth.steps}
    rows = {(row.policy, row.host, bool(row.disk)): row for row in answer.rows}
    assert steps.keys() == rows.keys()
    small, large = (rows["lru", host, False] for host in asked(requests).hosts[:2])
    step = steps["lru", large.host, False]
    assert step.per_host_gb == pytest.approx(
        (large.cost - small.cost) / (large.host - small.host) * 1e9
    )
    disk = steps["lru", small.host, True]
    added = rows["lru", small.host, True].cost - small.cost
    assert disk.per_disk_gb == pytest.approx(added / disk.disk * 1e9)
    assert steps["lru", small.host, False].per_disk_gb is None
    assert set(answer.worth.knees) <= {"lru", "learned"}


def test_a_curve_bends_farthest_above_its_chord():
    assert bend([(10, 0.1), (20, 0.5), (40, 0.55), (80, 0.6)]) == 20
    assert bend([(10, 0.0), (20, 0.0)]) is None


def test_the_command_prints_the_sizes(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at * 1000, "input_length": 2048, "output_length": 1}
        | {"hash_ids": [4 * (at % 30) + block for block in range(4)]}
        for at in range(120)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = ["advise", str(trace), "--bytes-per-token", "1024", "--gpu", "8MiB", "--disk", "1GiB"]
    words += ["--host", "16MiB,64MiB,128MiB"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "Sizes worth their price" in text
    assert "The curve of lru bends at host 6" in text
    assert main([*words, "--json"]) == 0
    worth = json.loads(capsys.readouterr().out)["worth"]
    assert len(worth["steps"]) == 12
    assert 60 * 2**20 <= worth["knees"]["lru"] <= 70 * 2**20
    assert 0 < worth["equal"] <= 64 * 2**20
