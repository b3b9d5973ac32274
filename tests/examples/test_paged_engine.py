"""The paged engine: the tokens of transformers, however little room there is and whatever fails."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

import pytest
import torch
from event_readers import Subscriber, VllmReader

from examples.paged_engine import chats
from examples.paged_engine.model import Sequence, shard
from examples.paged_engine.ranks import RankLostError
from examples.paged_engine.scheduler import ChatRequest, Scheduler, StepEvent, StepReport
from examples.paged_engine.slots import Slots
from examples.paged_engine.worker import Setup, _Worker
from kvtrie import ModelShape, Moves
from kvtrie.cluster import Publisher

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.paged_engine"]


@pytest.fixture(scope="module")
def llama():
    threads = torch.get_num_threads()
    yield chats.tiny_llama()
    torch.set_num_threads(threads)


def side_by_side(*calls):
    """Results of both ranks' calls, in threads; ranks wait for each other in every layer."""
    results = {}
    threads = [
        Thread(target=lambda at=at, call=call: results.update({at: call()}))
        for at, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[at] for at in range(len(calls))]


def unreliable(worker, luck, share=0.2):
    """Let a share of a worker's copies fail before they begin."""

    def attempt(copy, *arguments):
        if luck.random() < share:
            raise OSError("no luck")
        copy(*arguments)

    for pool in worker.pools:
        pool.copy_from = partial(attempt, pool.copy_from)


class Threads:
    """`Ranks` without processes: the same workers over the same pipe.

    Moves may fail, and rank 1 carries those of a step out from the last to the first.
    """

    seed = None

    def __init__(self, setups):
        pipes = Pipe()
        self.workers = [_Worker(rank, setups[rank], pipes[rank]) for rank in range(2)]
        self.handed_out = set()
        self.ended = set()
        self.waited = 0
        if self.seed is not None:
            for rank, worker in enumerate(self.workers):
                unreliable(worker, random.Random(2 * self.seed + rank))

    def step(self, step):
        moves = [move for data in step.moves for move in Moves.from_bytes(data)]
        for move in moves:
            assert move.id not in self.handed_out
            assert move.after == 0 or move.after in self.ended
            self.handed_out.add(move.id)
            self.waited += move.after > 0
        steps = (step, step._replace(moves=step.moves[::-1]))
        workers = zip(self.workers, steps, strict=True)
        replies = side_by_side(
            *(lambda one=one, step=step: one.step(step) for one, step in workers)
        )
        failed = {ident for reply in replies for ident in reply.failed}
        self.ended.update(move.id for move in moves if move.id not in failed)
        return replies


@pytest.fixture
def engine(llama, monkeypatch):
    """Makes an engine of threads whose clock ticks once per look."""
    monkeypatch.setattr(chats, "Ranks", Threads)

    def make(gpu=18, host=32, fail_on=-1):
        manager, ranks = chats.start(llama, gpu, host, fail_on)
        clock = count(1, 1_000_000)
        return manager, ranks, Scheduler(manager, ranks, lambda: next(clock))

    return make


def drain(manager, scheduler):
    reports = []
    while not scheduler.idle:
        reports.append(scheduler.step())
        manager.audit()
    return reports


def happened(reports, what):
    return [
        (at, e.who, e.amount)
        for at, one in enumerate(reports)
        for e in one.events
        if e.what == what
    ]


@pytest.mark.slow
def test_the_command_shows_what_it_promises():
    ran = subprocess.run(
        [*COMMAND, "--json", "--audit"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    report = json.loads(ran.stdout)
    assert (report["ok"], report["wrong"], report["missing"]) == (True, [], [])
    assert report["margin"] > 1e-3  # so far apart that rounding does not choose the token
    reports = [
        StepReport(step["computed"], [StepEvent(*event) for event in step["events"]])
        for step in report["steps"]
    ]
    assert max(len(report.computed) for report in reports) == 3
    assert sum(amount for *_, amount in happened(reports, "from gpu")) == 96
    [(at, who, lost)] = happened(reports, "failed load")
    [shared] = [amount for _, name, amount in happened(reports, "from gpu") if name == who]
    [wanted] = [amount for _, name, amount in happened(reports, "from host") if name == who]
    [length] = [amount for _, name, amount in happened(reports, "done") if name == who]
    [turn] = [turn for turn in chats._TURNS if turn.name == who]
    assert (shared, wanted, lost) == (24, 24, 8)  # gpu blocks are neither loaded nor computed
    assert reports[at + 1].computed[who] == length - turn.answer - shared - wanted + lost
    for at, who, tokens in happened(reports, "preempted"):
        assert (who, tokens) in [
            (n, t) for later, n, t in happened(reports, "resumed") if later > at
        ]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("gpu", "host", "fail_on"),
    [(16, 32, 0), (16, 32, 1), (12, 64, 1), (12, 5, 0), (64, 64, -1), (30, 1, -1)],
)
def test_tokens_are_right_in_any_room(engine, llama, gpu, host, fail_on):
    manager, _, scheduler = engine(gpu, host, fail_on)
    answered, reports = chats.serve(scheduler, lambda *_: manager.audit())
    verdict = chats.judge(llama, answered, reports)
    assert verdict["wrong"] == []
    assert verdict["margin"] > 1e-3
    assert bool(happened(reports, "failed load")) == (fail_on >= 0)
    assert bool(happened(reports, "preempted")) == (gpu < 30)
    assert scheduler.slots.free == gpu


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_right_when_a_fifth_of_all_moves_fails(engine, llama, seed, monkeypatch):
    monkeypatch.setattr(Threads, "seed", seed)
    manager, _, scheduler = engine(gpu=14, host=24)
    answered, reports = chats.serve(scheduler, lambda *_: manager.audit())
    assert chats.judge(llama, answered, reports)["wrong"] == []
    assert happened(reports, "failed load")
    assert scheduler.slots.free == 14


def follow(scheduler):
    """One request to its end, and the next turn of its chat at once."""
    request = ChatRequest("one", list(range(1, 30)), 40)
    scheduler.submit(request)
    while not happened([scheduler.step()], "done"):
        pass
    scheduler.submit(ChatRequest("two", [*request.tokens], 44))


def test_what_is_being_written_down_can_be_shared(engine):
    manager, _, scheduler = engine()
    follow(scheduler)
    reports = drain(manager, scheduler)
    assert happened(reports, "from gpu") == [(0, "two", 32)]
    assert happened(reports, "stored") == [(0, "blocks", 4), (4, "blocks", 1)]
    assert [report.computed.get("two", 0) for report in reports] == [8, 1, 1, 1, 0]


def test_a_load_waits_for_the_store_that_brings_its_source(engine, monkeypatch):
    manager, ranks, scheduler = engine()
    monkeypatch.setattr(scheduler.slots, "find", lambda _: [])
    follow(scheduler)
    reports = drain(manager, scheduler)
    assert happened(reports, "from host") == [(0, "two", 32)]
    assert happened(reports, "stored") == [(0, "blocks", 4), (6, "blocks", 1)]
    assert happened(reports, "loaded") == [(1, "blocks", 4)]
    assert [report.computed.get("two", 0) for report in reports] == [0, 0, 8, 1, 1, 1, 0]
    assert ranks.waited == 4


def test_a_load_whose_store_failed_is_never_carried_out(engine, monkeypatch):
    manager, ranks, scheduler = engine()
    monkeypatch.setattr(scheduler.slots, "find", lambda _: [])
    follow(scheduler)
    unreliable(ranks.workers[0], random.Random(0), share=1)
    reports = drain(manager, scheduler)
    assert happened(reports, "failed load") == [(0, "two", 8)] * 4
    assert happened(reports, "loaded") == []
    assert [report.computed.get("two", 0) for report in reports] == [0, 40, 1, 1, 1, 0]
    assert ranks.waited == 0
    assert scheduler.slots.free == 18


def test_requests_that_run_share_slots_and_compute_the_rest(engine):
    manager, _, scheduler = engine()
    scheduler.submit(ChatRequest("one", list(range(1, 30)), 50))
    scheduler.step()
    scheduler.submit(ChatRequest("two", [*range(1, 30), 7], 50))
    report = scheduler.step()
    assert happened([report], "from gpu") == [(0, "two", 24)]
    assert report.computed == {"one": 1, "two": 6}
    assert scheduler.slots.free == 18 - 4 - 1
    drain(manager, scheduler)
    assert scheduler.slots.free == 18


def test_who_is_youngest_steps_back_even_for_itself(engine):
    manager, _, scheduler = engine(gpu=4)
    scheduler.submit(ChatRequest("before", list(range(24)), 25))
    drain(manager, scheduler)  # from now on host has these three blocks
    scheduler.submit(ChatRequest("old", [50], 6))
    scheduler.submit(ChatRequest("young", list(range(24)), 27))
    reports = drain(manager, scheduler)
    assert happened(reports, "preempted") == [(2, "young", 25)]
    assert happened(reports, "stored") == []
    assert happened(reports, "resumed") == [(5, "young", 25)]
    assert [list(report.computed) for report in reports] == [
        *(["old"], ["old", "young"], ["old"], ["old"], ["old"], [], ["young"], ["young"]),
    ]
    assert scheduler.slots.free == 4


def test_what_could_never_run_is_refused(engine):
    _, _, scheduler = engine(gpu=12)
    for tokens, length in (([], 5), ([1, 2], 2), ([1], 97)):
        with pytest.raises(ValueError, match=f"of {len(tokens)} tokens is to have {length}"):
            scheduler.submit(ChatRequest("no", tokens, length))
    assert scheduler.idle
    scheduler.submit(ChatRequest("yes", [1], 96))


def test_two_ranks_over_block_tables_give_the_models_logits(llama):
    """Chunked prefill, decode, and a hole computed last, batched with one another."""
    config = llama.config.to_dict()
    shape = ModelShape.from_config(llama.config, tp=2)
    setups = [
        Setup(shape, config, shard(llama, rank, 2), [12], 8, fail_a_load=False) for rank in range(2)
    ]
    ranks = [(worker._model, worker._memory) for worker in Threads(setups).workers]
    pools = [pool for _, pool in ranks]
    assert pools[0].shape == (12, 4, 2, 8, 2, 8)
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randint(1, 211, (n,), generator=generator).tolist() for n in (37, 20))
    tables = [7, 2, 11, 0, 5], [3, 9, 4]

    def step(*parts):
        batch = [
            Sequence([tokens[at] for at in positions], list(positions), table)
            for tokens, positions, table in parts
        ]
        calls = (lambda model=model, pool=pool: model.forward(batch, pool) for model, pool in ranks)
        first, second = side_by_side(*calls)
        assert torch.equal(first, second)
        return first

    def expected(tokens):
        with torch.no_grad():
            return llama(torch.tensor([tokens])).logits[0, -1]

    logits = step((one, range(30), tables[0]), (two, range(8), tables[1]))
    torch.testing.assert_close(logits[0], expected(one[:30]), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1], expected(two[:8]), atol=1e-4, rtol=0)
    logits = step((two, range(8, 19), tables[1]), (one, range(30, 31), tables[0]))
    torch.testing.assert_close(logits[0], expected(two[:19]), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1], expected(one[:31]), atol=1e-4, rtol=0)
    for pool in pools:
        pool[2] = torch.nan  # block 1 of the first is lost
    logits = step((one, [*range(8, 16), *range(31, 37)], tables[0]), (two, [19], tables[1]))
    torch.testing.assert_close(logits[0], expected(one), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1], expected(two), atol=1e-4, rtol=0)


def test_slots_are_free_when_their_last_holder_lets_go():
    slots = Slots(4, 2)
    table = slots.take(3)
    slots.name([1, 2, 3, 4, 5], table)
    assert slots.find([1, 2, 3, 4]) == table[:1]  # a token is left to compute
    assert slots.find([1, 2, 3, 4, 6]) == table[:2]
    assert slots.find([1, 3, 3, 4, 6]) == []
    shared = slots.hold(slots.find([1, 2, 3, 4, 6]))
    slots.give(table)
    assert slots.free == 2
    assert slots.find([1, 2, 3, 4, 6]) == shared
    slots.give(shared)
    assert slots.free == 4
    assert slots.find([1, 2, 3, 4, 6]) == []


def test_a_wrong_token_or_a_missing_event_is_no_success(llama, monkeypatch):
    monkeypatch.setattr(chats, "_TURNS", (chats.ChatTurn("it", 0, 5, 3),))
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    right = llama.generate(prompt, max_new_tokens=3, do_sample=False)[0].tolist()
    events = [StepEvent("it", what, 8) for what in chats._PROMISED]
    reports = [StepReport({"it": 5, "other": 1}, events)]
    assert chats.judge(llama, {"it": right}, reports)["ok"]
    for what in chats._PROMISED[2:]:
        less = [
            StepReport({"it": 5, "other": 1}, [event for event in events if event.what != what])
        ]
        report = chats.judge(llama, {"it": right}, less)
        assert (report["ok"], report["missing"]) == (False, [what])
    alone = [StepReport({"it": 5}, events[2:])]
    assert chats.judge(llama, {"it": right}, alone)["missing"] == ["batch", "mixed batch"]
    wrong = [*right[:-1], right[-1] + 1]
    report = chats.judge(llama, {"it": wrong}, reports)
    assert (report["ok"], report["wrong"]) == (False, ["it"])


@pytest.mark.slow
def test_a_dead_worker_is_an_error_and_not_a_hang(llama):
    manager, ranks = chats.start(llama, 18, 32, -1)
    with closing(ranks):
        scheduler = Scheduler(manager, ranks, count(1).__next__)
        scheduler.submit(ChatRequest("it", [1, 2, 3], 30))
        scheduler.step()
        ranks.processes[1].kill()
        ranks.processes[1].join()
        with pytest.raises(RankLostError, match=r"^rank 1 \(process \d+\) ended with status -9$"):
            scheduler.step()
        assert [process.exitcode for process in ranks.processes] == [0, -9]


@pytest.mark.slow
def test_a_reader_of_its_events_knows_the_host_tier(llama):
    manager, ranks = chats.start(llama, 16, 32, -1, events=True)
    address = "tcp://127.0.0.1:0"
    with closing(ranks), Publisher(manager, address, address) as publisher:
        scheduler = Scheduler(manager, ranks, partial(next, count()), publisher)
        chats.serve(scheduler, lambda *_: None)
        with Subscriber(VllmReader(), publisher.endpoint, publisher.replay) as subscriber:
            known = len(subscriber.reader.names("CPU"))
        assert known == manager.stats().tiers["host"].copies > 10
        assert publisher.counts.contents == 1


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_every_process():
    with subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("  0  ann +37")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them get it
        _, errors = process.communicate()  # returns when none of them holds the pipes any more
        assert (process.returncode, errors) == (130, "Stopped.\n")
