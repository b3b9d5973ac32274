"""Copies of a step on three streams: their order, and a wait wherever one overtakes another."""

import random

import pytest
from tests.engines.recorded_streams import RecordedStream, Timeline, record_copies
from tests.engines.step_rig import LAYERS, StepRig
from tests.engines.vllm_engine import SIZE, Engine, play

from kvtrie.engines.vllm.device_reports import DeviceReports
from kvtrie.engines.vllm.step_copies import StepCopies


class RecordedEngine(Engine):
    """The naive engine with three recorded streams per worker."""

    def open(self, settings, names, ranks, stages, *, replicated):
        self.timelines = [Timeline(self.draw.random()) for _ in range(ranks)]
        super().open(settings, names, ranks, stages, replicated=replicated)

    def stream(self, rank):
        return self.timelines[rank].stream

    def compute(self, name, memory, rows, tables, bad):
        for rank, layers in enumerate(self.memory):
            for layer, each in enumerate(layers.values()):
                if each is memory:
                    self._record(self.timelines[rank], layer, len(layers), rows, tables)
        super().compute(name, memory, rows, tables, bad)

    def _record(self, timeline, layer, layers, rows, tables):
        reads, writes = [], []
        for request, _tokens, begin, count in rows:
            units = [("gpu", slot * layers + layer) for slot in tables[request][0]]
            reads += units[: begin // SIZE]
            writes += units[begin // SIZE : -(-(begin + count) // SIZE)]
        timeline.access(f"compute {layer}", reads, writes)


def played(monkeypatch, seed, failing=0.0):
    """Races of conversations with preemptions, aborts and copies that fail."""
    timelines, draw = {}, random.Random(seed)

    def fails():
        return draw.choice(["before", "after"]) if draw.random() < failing else ""

    with monkeypatch.context() as patched:
        record_copies(patched, timelines, fails)
        one = RecordedEngine("", 1 + seed % 2, seed % 3, seed, use_layerwise=draw.random() < 0.7)
        for worker, timeline in zip(one.workers, one.timelines, strict=True):
            timelines[worker.gpu] = timeline
        play(one, 12, seed, aborts=0.2)
        one.close()
    assert "store" in {stream for each in one.timelines for stream, _ in each.log}
    return [race for each in one.timelines for race in each.races]


@pytest.mark.parametrize("failing", [0.0, 0.2])
def test_every_access_of_a_block_waits_for_the_one_before(monkeypatch, failing):
    for seed in range(12):
        assert played(monkeypatch, seed, failing) == [], seed


PLANTED = {
    "stores that read blocks vLLM took back": (StepCopies, "await_stores"),
    "a layer's loads": (RecordedStream, "hold"),
    "the computation before a copy": (RecordedStream, "follow"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_missing_wait_is_found(monkeypatch, name):
    kind, method = PLANTED[name]
    monkeypatch.setattr(kind, method, lambda *_: None)
    assert any(played(monkeypatch, seed) for seed in range(12))


def test_a_report_before_its_copy_is_found(monkeypatch):
    add = DeviceReports.add
    monkeypatch.setattr(DeviceReports, "add", lambda self, reports, _: add(self, reports, None))
    assert any(played(monkeypatch, seed) for seed in range(12))


class World(StepRig):
    """A rig with recorded streams."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.timeline = Timeline()
        record_copies(
            monkeypatch, {self.gpu: self.timeline}, lambda: self.fails and self.fails.pop(0)
        )
        self.fails = []
        load, store = self.timeline.stream(None), self.timeline.stream(None)
        self.copies = StepCopies(self.gpu, self.host, load, store, [range(LAYERS)])

    def log(self):
        log, self.timeline.log[:] = list(self.timeline.log), []
        return log


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_stores_follow_each_layer_and_hold_nothing_up(world):
    copies = world.copies
    copies.begin([])
    copies.store_ahead(world.stores[:1])
    copies.store_ahead(world.stores[1:])
    copies.start_loads()
    for layer in range(LAYERS):
        copies.wait_for_layer(layer)
        copies.save_layer(None)
        copies.save_layer(layer)
        # The store stream waits once per layer, whatever the number of requests.
        assert world.log() == [("store", "follow"), *[("store", f"copy [{layer}]")] * 2]
    copies.finish()
    assert world.log() == []
    assert {each for report in copies.reports(wait=True) for each in report.ids} == {1, 2, 3, 4}


def test_two_layers_are_loaded_ahead_and_each_is_awaited_once(world):
    copies = world.copies
    copies.begin([])
    copies.load(world.loads[:1])
    copies.load(world.loads[1:])
    copies.start_loads()
    copied = [[("load", f"copy [{layer}]")] * 2 for layer in range(LAYERS)]
    assert world.log() == [("load", "follow"), *copied[0], *copied[1]]
    for layer in range(LAYERS):
        copies.wait_for_layer(layer)
        ahead = copied[layer + 2] if layer + 2 < LAYERS else []
        assert world.log() == [*ahead, ("engine", "wait for load")]
        copies.wait_for_layer(layer)
        assert world.log() == []
    copies.finish()
    assert world.log() == []
    assert sum(len(each.ids) for each in copies.reports(wait=True)) == 4


def test_a_graph_of_all_layers_waits_for_all_loads_once(world):
    copies = world.copies
    copies.begin([])
    copies.load(world.loads)
    copies.finish_loads()
    whole = ("load", f"copy {[*range(LAYERS)]}")
    assert world.log() == [("load", "follow"), whole, ("engine", "wait for load")]
    copies.finish()
    assert world.log() == []


def test_only_the_failing_block_of_a_layer_is_lost(world):
    copies, loads = world.copies, world.loads
    copies.begin([9])
    copies.load(loads)
    world.fails += ["", "after", "before"]  # layer 1 together, then the first block by itself
    copies.start_loads()
    copies.finish()
    assert copies.bad_slots() == {9, int(loads.dst_slot[0])}
    failed, done = copies.reports(wait=True)
    assert (failed.ids, done.ids) == ((int(loads.id[0]),), tuple(loads.id[1:].tolist()))
    assert "injected" in failed.error


def test_an_aborted_step_is_reported_and_its_loads_are_awaited(world):
    copies, loads, stores = world.copies, world.loads, world.stores
    copies.begin([])
    copies.load(loads)
    copies.store_ahead(stores)
    copies.start_loads()
    copies.wait_for_layer(0)
    copies.save_layer(0)
    world.log()
    copies.begin([])
    assert world.log() == [("engine", "wait for load")]
    reports = copies.reports(wait=True)
    assert [report.ids for report in reports] == [
        tuple(loads.id.tolist()),
        tuple(stores.id.tolist()),
    ]
    assert all("aborted" in report.error for report in reports)
    copies.finish()
    assert (world.log(), copies.bad_slots()) == ([], set())


def test_a_step_without_copies_enqueues_nothing(world):
    copies = world.copies
    copies.begin([])
    copies.start_loads()
    for layer in range(LAYERS):
        copies.wait_for_layer(layer)
        copies.save_layer(layer)
    copies.finish()
    assert (copies.reports(wait=False), world.log()) == ([], [])


def test_memory_is_free_of_copies_after_a_drain(world):
    copies, timeline = world.copies, world.timeline
    copies.begin([])
    copies.store(world.stores)
    copies.load(world.loads)
    copies.finish_loads()
    copies.drain()
    for stream in ("load", "store"):  # the host's memory calls come after all copies
        assert timeline.clocks["host"][stream] == timeline.clocks[stream][stream]
