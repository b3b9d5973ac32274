"""Moves and reports as bytes: a manager here, the ranks that copy elsewhere."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import SHAPE, SIZE, Shelf

from kvtrie import BlockManager, Moves, Tier
from kvtrie.errors import ConfigError
from kvtrie.tiers import Pool
from kvtrie.transfer import Dispatch, MoveReport, Runner

SLOTS, HOST, DISK = 64, 5, 12


def world(ranks=1, host=HOST, write="back"):
    tiers = [
        Tier("gpu", blocks=SLOTS, owner="engine", write="through"),
        Tier("host", blocks=host, write=write),
        Tier("disk", blocks=DISK),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE, ranks=ranks)
    return manager, Dispatch(manager, ranks)


def write(manager, tokens, slots):
    lease = manager.acquire(tokens, now=1, keep=0, load="none")
    lease.bind(0, slots)
    lease.commit(tokens[lease.matched :], now=1)
    return lease


def ids_of(parts):
    return [ident for part in parts for ident in part.id.tolist()]


def words(seed, blocks):
    return np.random.default_rng(seed).integers(0, 99, blocks * SIZE, dtype=np.uint32)


reports = st.lists(
    st.builds(
        MoveReport,
        ids=st.lists(st.integers(1, 2**63), max_size=4).map(tuple),
        layers_done=st.none() | st.integers(0, 99),
        error=st.none() | st.text(max_size=9),
        hung=st.booleans(),
        cancelled=st.booleans(),
        group=st.integers(0, 3),
    ),
    max_size=4,
)


@given(reports)
def test_reports_travel_as_bytes(given_):
    assert MoveReport.from_bytes(MoveReport.to_bytes(given_)) == given_


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"7",
        b"[2]",
        b"[1,[[1],null,null,false,false]]",
        b"[1,[[-1],null,null,false,false,0]]",
        b"[1,[[1],null,3,false,false,0]]",
        b"[1,[[1],null,null,0,false,0]]",
        b"\xff\xfe",
        json.dumps([1, [["a"], None, None, False, False, 0]]).encode(),
    ],
)
def test_bytes_that_are_no_reports_are_refused(data):
    with pytest.raises(ConfigError, match="report"):
        MoveReport.from_bytes(data)


def full(ranks=1):
    """A host of two dirty blocks, and two stores that wait until those are on disk."""
    manager, dispatch = world(ranks, host=2)
    with write(manager, words(1, 2), [0, 1]):
        stores = ids_of(dispatch.take(1))
        for rank in range(ranks):
            assert not dispatch.on_reports(rank, [MoveReport(tuple(stores))], 1)
    lease = write(manager, words(2, 2), [2, 3])
    down = ids_of(dispatch.take(1))
    assert len(down) == 2
    assert dispatch.pending == 4
    return manager, dispatch, lease, down


def test_a_move_waits_for_the_other_on_every_rank():
    manager, dispatch, lease, down = full(ranks=2)
    dispatch.on_reports(0, [MoveReport(tuple(down))], 1)
    assert not dispatch.take(1)
    dispatch.on_reports(1, [MoveReport(tuple(down))], 1)
    stores = ids_of(dispatch.take(1))
    assert len(stores) == 2
    assert sorted(lease.release(now=1)) == sorted(stores)
    manager.audit()


def test_what_waits_is_taken_back_with_its_slot_and_what_runs_is_not():
    manager, dispatch, lease, down = full()
    left = lease.release(now=1).tolist()
    assert len(left) == 2
    assert dispatch.cancel([*left, *down], 1, "given back") == 2
    dispatch.on_reports(0, [MoveReport(tuple(down))], 1)
    assert not dispatch.take(1)
    assert dispatch.pending == 0
    assert manager.stats().moves == 0
    manager.audit()


def test_what_the_manager_has_still_to_hand_out_is_refused_when_it_comes():
    manager, dispatch = world()
    lease = write(manager, words(1, 3), [0, 1, 2])
    left = lease.release(now=1).tolist()
    assert dispatch.cancel(left[:2], 1, "given back") == 0
    assert ids_of(dispatch.take(1)) == left[2:]
    dispatch.on_reports(0, [MoveReport(tuple(left[2:]))], 1)
    assert manager.stats().moves == 0
    manager.audit()


def test_a_failed_move_takes_along_what_waits_for_it_and_a_hung_one_reports_twice():
    manager, dispatch, lease, down = full()
    hung = MoveReport((down[0],), error="no end", hung=True)
    assert len(dispatch.on_reports(0, [hung], 1)) == 2
    assert dispatch.pending == 3  # an engine goes on with its steps until the second report
    assert not dispatch.on_reports(0, [MoveReport((down[0],), error="ended late")], 1) - {down[0]}
    assert dispatch.pending == 2
    assert not dispatch.on_reports(0, [MoveReport((down[0],))], 1)  # nothing is left to report
    dispatch.on_reports(0, [MoveReport((down[1],))], 1)
    lease.release(now=1)
    manager.audit()


class Cluster:
    """Ranks in which a block's bytes are a number made of its tokens."""

    def __init__(self, ranks):
        self.manager, self.dispatch = world(ranks, 6, "through")
        self.gpus = [Pool(SHAPE, SLOTS, SIZE) for _ in range(ranks)]
        self.runners = [
            Runner([gpu, Pool(SHAPE, 6, SIZE), Shelf()], workers=0) for gpu in self.gpus
        ]

    def step(self):
        """Carry moves to every rank and reports back, as bytes."""
        parts = [part.to_bytes() for part in self.dispatch.take(1)]
        for rank, runner in enumerate(self.runners):
            for part in parts:
                runner.submit(Moves.from_bytes(part))
            data = MoveReport.to_bytes(runner.drain())
            self.dispatch.on_reports(rank, MoveReport.from_bytes(data), 1)

    def serve(self, tokens, table):
        """A request that compares what was loaded and computes the rest."""
        lease = self.manager.acquire(tokens, now=1, keep=0, load="all")
        lease.bind(0, table)
        while not lease.ready():
            self.step()
        for gpu in self.gpus:
            for at, slot in enumerate(table.tolist()):
                mark = int(tokens[at * SIZE : at * SIZE + SIZE].sum()) % 251
                units = gpu.units(slot, 0, SHAPE.layers)
                if at * SIZE < lease.matched:
                    assert (gpu.planes[0][units] == mark).all()
                gpu.planes[0][units] = mark
        lease.commit(tokens[lease.matched :], now=1)
        return lease


@given(st.integers(0, 2**16), st.integers(1, 2))
def test_random_requests_over_ranks_that_only_see_bytes(seed, ranks):
    draw, cluster = np.random.default_rng(seed), Cluster(ranks)
    prompts = [words(at, 4) for at in range(4)]
    for _ in range(12):
        tokens = prompts[draw.integers(4)][: SIZE * draw.integers(1, 5)]
        lease = cluster.serve(tokens, draw.permutation(SLOTS)[: len(tokens) // SIZE])
        if draw.integers(2):
            cluster.step()
        cluster.dispatch.cancel(lease.release(now=1).tolist(), 1, "given back")
    for _ in range(8):
        cluster.step()
    assert cluster.dispatch.pending == 0
    cluster.manager.audit()
    for runner in cluster.runners:
        runner.close()
