"""The soak: a small one is well, and a single wrong byte anywhere ends it."""

import json
from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from kept import memory_folder

from benches.soak import __main__ as door
from benches.soak.asks import ROUND, SIZE, Ask, asks
from benches.soak.check import checks
from benches.soak.engine import SHAPE, Engine
from benches.soak.pattern import Pattern
from benches.soak.sample import Sample
from benches.soak.slope import MOST, NOISE, Slope
from benches.soak.storage import EVERY, PLANNED
from kvtrie._kvtrie import DiskStore
from kvtrie.errors import TransferError
from kvtrie.tiers import Pool
from kvtrie.transfer import Executor

ROOMS = [32, 48, 64]
PAGE = 4096


@pytest.fixture
def engine(tmp_path):
    """One that has filled all tiers."""
    with closing(Engine(ROOMS, tmp_path)) as engine:
        stream = asks(1, engine.most)
        engine.past = [next(stream) for _ in range(120)]
        for ask in engine.past:
            engine.serve(ask)
        engine.settle()
        assert engine.healthy
        yield engine


def found_on(engine, tier):
    """A request of the past, and the slot of a block of it that is found on this tier first."""
    for ask in engine.past:
        if ask.given_up:
            continue
        prompt, now = ask.tokens[: ask.prompt], engine.executor.clock()
        match = engine.manager.lookup(prompt, now=now, scope=ask.scope)
        for block in match.blocks[: ask.prompt // SIZE]:
            if min(copy.tier for copy in block.copies) == tier:
                [copy] = [copy for copy in block.copies if copy.tier == tier]
                return ask, copy.slot
    raise AssertionError(f"no block is on tier {tier} first")


def test_a_soak_keeps_to_its_minutes(tmp_path):
    given = Namespace(minutes=3.0, requests=None, seed=0)
    now = count(0.0, 0.5)
    with closing(Engine(ROOMS, tmp_path)) as engine:
        done = door.soak(engine, given, lambda: next(now))
    assert engine.healthy
    assert len(done.minutes) == 3
    assert 20 <= done.warm.at_s < 30
    assert 180 <= done.end.at_s < 200
    assert 0 < done.warm.requests < done.end.requests


def test_a_wrong_byte_on_the_way_is_exit_status_1(monkeypatch, capsys):
    copy, loads = Pool.copy_from, []

    def careless(self, source, source_units, units):
        copy(self, source, source_units, units)
        if self.blocks == ROOMS[0] != source.blocks:
            loads.append(len(units))
            if len(loads) >= 20:  # a request that is given up does not look
                self.planes[0][int(units[-1]), 0] ^= 1

    monkeypatch.setattr(Pool, "copy_from", careless)
    assert door.main(["--requests", "400", "--blocks", *map(str, ROOMS)]) == 1
    out = capsys.readouterr().out
    assert "other bytes in block" in out
    assert "not so" in out
    assert "it failed" in out


def test_what_hangs_is_told_with_the_figures(monkeypatch, capsys):
    def hangs(_executor, lease):
        raise TransferError(f"lease {lease.id} awaits moves that hang")

    monkeypatch.setattr(Executor, "wait", hangs)
    assert door.main(["--requests", "10", "--json", "--blocks", *map(str, ROOMS)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"]
    [told] = document["what"]
    assert told.startswith("TransferError: lease ")


def test_a_second_engine_finds_what_the_first_one_kept(tmp_path):
    with memory_folder() as memory:
        first = Engine(ROOMS, tmp_path, memory / "host")
        stream = asks(1, first.most)
        for _ in range(120):
            first.serve(next(stream))
        first.settle()
        blocks, hits, wrong = door.take_over(
            Namespace(blocks=ROOMS), first, tmp_path, memory / "host"
        )
    assert first.healthy
    assert blocks.warm == blocks.end > ROOMS[1] // 2
    assert hits.end > 0
    assert all(row.ok for row in (blocks, hits, wrong))


@pytest.mark.parametrize("tier", [0, 1])
def test_a_flipped_bit_in_memory_is_noticed(engine, tier):
    ask, slot = found_on(engine, tier)
    unit = slot * SHAPE.layers + 5
    engine.pools[tier].planes[0][unit, 77] ^= 16
    engine.serve(ask)
    engine.settle()
    [told] = set(engine.what)
    assert "other bytes in block" in told
    assert told.endswith("layer 5")
    assert engine.wrong


def test_a_flipped_bit_on_disk_is_a_miss_and_told(engine, tmp_path):
    ask, slot = found_on(engine, 2)
    [(store, _)] = DiskStore.stores(tmp_path)
    seen = engine.pools[2].store
    stride = -(-seen.layer_bytes // PAGE) * PAGE
    with (store / "segment-00000").open("r+b") as file:
        file.seek((slot + 1) * seen.slot_bytes - stride)  # its last layer
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    engine.serve(ask)
    engine.settle()
    assert engine.wrong == 0
    assert "layer 7 has checksum" in engine.what[0]
    sample = Sample.of(engine, 0.0)
    assert sample.failed["host"] == sample.planned + 1


def test_every_part_of_a_place_has_bytes_of_its_own():
    pattern = Pattern(layers=3, words=4, most=64)
    tokens = np.arange(40, dtype=np.uint32) // 20
    kv = pattern.of(tokens)
    assert kv.shape == (3, 40, 2, 4)
    assert len(np.unique(kv)) == kv.size
    assert np.array_equal(pattern.of(tokens[:7]), kv[:, :7])
    marked = pattern.of(tokens, [(0, b"a"), (20, b"b")])
    assert (marked != kv).all()
    again = pattern.of(tokens, [(0, b"a"), (20, b"c")])
    assert np.array_equal(again[:, :20], marked[:, :20])
    assert (again[:, 20:] != marked[:, 20:]).all()
    tokens[20] += 1
    other = pattern.of(tokens)
    assert np.array_equal(other[:, :20], kv[:, :20])
    assert (other[:, 20:] != kv[:, 20:]).all()


def test_traces_go_on_with_new_tokens():
    first, again = asks(3, 100), asks(3, 100)
    rounds = set(), set()
    for number in range(ROUND + 100):
        ask, same = next(first), next(again)
        assert isinstance(ask, Ask)
        assert np.array_equal(ask.tokens, same.tokens)
        assert 1 <= ask.prompt < len(ask.tokens) <= 100
        rounds[number // ROUND].update(ask.tokens.tolist())
        assert ask[1:] == same[1:]
    assert rounds[0].isdisjoint(rounds[1])


def test_tenants_sessions_and_images_are_ever_new():
    stream = asks(3, 100)
    rounds = [[next(stream) for _ in range(ROUND)] for _ in range(2)]
    for of in (
        lambda ask: {ask.scope.tenant},
        lambda ask: {ask.session},
        lambda ask: {digest for _, digest in ask.scope.extra},
    ):
        one, two = (set().union(*map(of, each)) for each in rounds)
        assert one.isdisjoint(two)
        assert min(len(one), len(two)) > ROUND / 5
    shares = [
        np.mean([bool(getattr(ask, name)) for ask in rounds[0]]) for name in ("given_up", "over")
    ]
    assert shares == pytest.approx([1 / 8, 1 / 2], abs=0.05)
    assert all(0 <= at < ask.prompt for ask in rounds[0] for at, _ in ask.scope.extra)


def test_an_engine_lives_with_reads_that_fail(tmp_path):
    with closing(Engine(ROOMS, tmp_path)) as engine:
        engine.disk.reads = EVERY - 1  # the next one
        stream = asks(1, engine.most)
        while not engine.disk.planned:
            engine.serve(next(stream))
        engine.settle()
        assert engine.healthy
        sample = Sample.of(engine, 0.0)
        assert sample.failed["host"] == sample.planned
        assert engine.manager.failed() == []
        engine.disk.reads = EVERY - 1
        with pytest.raises(TransferError, match=PLANNED):
            engine.disk.read(b"", 0, (0, 1), None)


WELL = Sample(
    at_s=60.0,
    requests=10,
    read=10,
    checked=10,
    wrong=0,
    failed={"gpu": 2, "host": 3, "disk": 0},
    planned=3,
    hits={"gpu": 5, "host": 5, "disk": 5},
    evicted={"gpu": 5, "host": 5, "disk": 5},
    wanted=20,
    disk_read=7,
    disk_written=7,
    resident=1000,
    descriptors=9,
    rings=1,
)
LATER = replace(WELL, at_s=120.0, requests=20, hits={"gpu": 6, "host": 6, "disk": 6})
FLAT = Slope(requests=10, per_request=0.0, per_hour=0.0)


@pytest.mark.parametrize(
    ("warm", "end", "what"),
    [
        ({}, {}, []),
        ({}, {"resident": 1020}, []),
        ({}, {"resident": 1021}, ["resident bytes"]),
        ({}, {"resident": 979}, ["resident bytes"]),
        ({}, {"descriptors": 10}, ["descriptors"]),
        ({}, {"rings": 2}, []),
        ({}, {"rings": 3}, ["rings"]),
        ({}, {"wrong": 1}, ["wrong blocks"]),
        ({}, {"planned": 0}, ["reads failed as planned", "failed moves to host"]),
        ({}, {"failed": {"gpu": 4, "host": 3, "disk": 0}}, ["failed moves to gpu"]),
        ({}, {"failed": {"gpu": 2, "host": 4, "disk": 0}}, ["failed moves to host"]),
        ({}, {"failed": {"gpu": 2, "host": 3, "disk": 1}}, ["failed moves to disk"]),
        ({"evicted": {"gpu": 5, "host": 5, "disk": 0}}, {}, ["disk: evictions"]),
        ({}, {"hits": WELL.hits}, [f"{tier}: blocks found" for tier in WELL.hits]),
    ],
    ids=str,
)
def test_what_must_hold(warm, end, what):
    rows = checks(replace(WELL, **warm), replace(LATER, **end), FLAT)
    assert [row.what for row in rows if not row.ok] == what


@pytest.mark.parametrize(("leak", "ok"), [(MOST - 1, True), (MOST + 1, False), (-300, True)])
def test_memory_that_grows_with_requests_is_no_soak(leak, ok):
    def at(requests):
        grown = min(requests, 40_000) * 1000 + requests * leak  # one part is bounded, one is a leak
        return replace(WELL, at_s=requests / 100, requests=requests, resident=10**9 + grown)

    slope = Slope.of([at(requests) for requests in range(0, 100_001, 2000)])
    assert slope.requests == 50_000
    assert slope.per_request == pytest.approx(leak)
    assert slope.per_hour == pytest.approx(leak * 360_000)
    assert slope.steady is ok
    wrong = [row.what for row in checks(WELL, LATER, slope) if not row.ok]
    assert wrong == ([] if ok else ["resident bytes a request"])


def test_a_short_soak_may_take_two_megabytes():
    few = Slope(requests=100, per_request=NOISE / 100, per_hour=0.0)
    assert few.steady
    assert not replace(few, requests=101).steady


@pytest.mark.parametrize(
    "words", ["--minutes 0.5", "--minutes nan", "--requests 1", "--blocks 4 32 32"]
)
def test_numbers_that_cannot_be_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        door.main(words.split())
    assert "wanted" in capsys.readouterr().err
