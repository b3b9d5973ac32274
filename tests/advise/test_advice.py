"""Predictions from a stock engine's events against replays that see all requests."""

import numpy as np
import pytest
from stock_engine import StockEngine

from kvtrie import Lane, ModelShape
from kvtrie.advise.advice import Question, advise, usual_hosts
from kvtrie.advise.predict import Setting, bound, play
from kvtrie.advise.rebuild import Rebuilt
from kvtrie.advise.server_metrics import Traffic
from kvtrie.errors import ConfigError
from kvtrie.sim.trace import TraceRequest
from kvtrie.sim.workloads import FAMILIES

SIZE = 512
MODEL = ModelShape(layers=1, kv_heads=1, head_dim=256, dtype="bfloat16")
BLOCK = MODEL.block_bytes(SIZE)
SMALL = 64
GPU = 2400


def served(name, number):
    """A trace in the blocks of an engine, and what a stock engine's events show of it."""
    requests = []
    for one in FAMILIES[name](requests=number):
        full = one.input_tokens // SMALL
        parts = np.arange(SIZE // SMALL, dtype=np.uint32)
        blocks = (one.blocks[:, None] * len(parts) + parts).reshape(-1)[:full]
        requests.append(TraceRequest(one.at, full * SMALL, 1, blocks.astype(np.uint32)))
    found = Rebuilt()
    for batch in StockEngine(GPU, SMALL).batches(requests):
        found.add(batch)
    return requests, found


@pytest.mark.parametrize("name", ["chats", "agents"])
def test_predictions_are_those_of_all_requests(name):
    requests, found = served(name, 400)
    since, first = bound(lambda: requests, SMALL).since, requests[0].at
    block = MODEL.block_bytes(SMALL)

    def below(some, policy, since):
        setting = Setting(GPU * block, 3 * GPU * block, policy=policy)
        played = play(some, setting, model=MODEL, block_tokens=SMALL, since=since)
        return played.found[:, 1:].sum()

    seen = sum(one.input_tokens for one in requests if one.at >= since)
    for policy, points in (("lru", 0.002), ("learned", 0.01)):
        all_of_them = below(requests, policy, since)
        predicted = below(found.requests(), policy, since - first)
        assert all_of_them > 0
        assert abs(predicted - all_of_them) / seen <= points


def chats(number, turns=3):
    """Chats whose turns return after all other chats: each prompt has the one before."""
    for turn in range(turns):
        for chat in range(number):
            blocks = np.arange(4 * (turn + 1), dtype=np.uint32) + 100 * chat
            at = (turn * number + chat) * 60 * 10**9
            yield TraceRequest(at, len(blocks) * SIZE, 1, blocks)


def asked(**more):
    base = {"model": MODEL, "block_tokens": SIZE, "gpu": 40 * BLOCK, "disk": 0}
    return Question(**(base | more))


def test_the_smallest_size_within_a_point_is_chosen():
    requests = list(chats(40))
    hosts = [BLOCK * blocks for blocks in (40, 160, 480, 960)]
    answer = advise(lambda: requests, asked(hosts=hosts, policies=("lru",)))
    assert [row.found for row in answer.rows] == pytest.approx([0, 0, 8 / 12, 8 / 12], abs=0.01)
    assert answer.chosen is not None
    assert answer.chosen.host == hosts[2]
    assert answer.most == pytest.approx(8 / 12, abs=0.01)
    assert answer.gpu == 0
    assert [row.beyond for row in answer.rows] == [False, False, False, True]
    assert answer.nothing is None
    assert answer.half.found == pytest.approx(8 / 12, abs=0.01)


def test_a_disk_is_chosen_where_it_finds_more():
    requests = list(chats(40))
    hosts, disk = [BLOCK * 40], BLOCK * 480
    answer = advise(lambda: requests, asked(hosts=hosts, disk=disk, policies=("lru",)))
    assert answer.chosen is not None
    assert (answer.chosen.host, answer.chosen.disk) == (hosts[0], disk)


def test_times_come_from_the_metrics_and_the_link():
    requests = list(chats(40))
    hosts = [BLOCK * 480]

    def answer(bytes_per_s):
        lanes = (Lane("host", bytes_per_s), Lane("disk", 1e9))
        traffic = Traffic(prompt_tokens=1e6, gpu_hits=0.0, token_s=1e-3)
        question = asked(hosts=hosts, policies=("lru",), traffic=traffic, lanes=lanes)
        return advise(lambda: requests, question).rows[0]

    fast = answer(1e15)
    assert fast.saved == pytest.approx(8 / 12, abs=0.01)
    assert fast.ttft_mean_s == pytest.approx(8 * SIZE * 1e-3, rel=0.01)
    assert fast.ttft_median_s == pytest.approx(8 * SIZE * 1e-3, rel=0.01)
    assert fast.helped == 1
    # A token is computed in 1 ms and has 1024 bytes: slower than that, a load saves nothing.
    half = answer(2 * BLOCK / SIZE * 1e3)
    assert half.saved == pytest.approx(fast.saved / 2, rel=0.01)
    slow = answer(BLOCK / SIZE * 1e3)
    assert (slow.found, slow.saved, slow.helped) == (0, 0, 0)


@pytest.mark.parametrize(
    ("requests", "gpu", "why"),
    [
        (
            [TraceRequest(at * 10**9, SIZE, 1, np.array([at], np.uint32)) for at in range(60)],
            40,
            "new",
        ),
        (list(chats(40)), 10_000, "on the GPU already"),
        (list(chats(40)), 40, "had left every size"),
    ],
)
def test_nothing_to_gain_has_its_reason(requests, gpu, why):
    answer = advise(lambda: requests, asked(hosts=[BLOCK * 40], gpu=gpu * BLOCK))
    assert answer.chosen is None
    assert why in answer.nothing


def test_shares_are_of_all_prompts():
    requests = list(chats(40))
    half = advise(lambda: requests, asked(hosts=[BLOCK * 480], coverage=0.5)).rows[0]
    assert half.found == pytest.approx(4 / 12, abs=0.01)


def test_usual_sizes_double_until_all_fits():
    assert usual_hosts(20, 140) == [20, 40, 80, 160]
    assert usual_hosts(20, 2) == [20]


def test_too_few_requests_are_refused():
    with pytest.raises(ConfigError, match="at least 10 wanted there; listen for longer"):
        advise(lambda: list(chats(3)), asked())


def test_a_size_below_a_block_is_refused():
    with pytest.raises(ConfigError, match=f"a size of 7 bytes is below a block of {BLOCK}"):
        advise(lambda: list(chats(40)), asked(hosts=[7]))
