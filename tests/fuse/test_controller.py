"""The controller: recomputation as long as loading, from what lanes and passes were seen to do."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch

from kvtrie import BlockManager, Lane, ModelShape, Tier
from kvtrie.errors import ConfigError
from kvtrie.fuse import CacheStore, Controller
from kvtrie.fuse.chunker import Given
from kvtrie.fuse.passes import Device, PassTable
from kvtrie.fuse.profile import Profile
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor
from kvtrie.transfer.layerwise import Layerwise, LayerwiseEngine

LAYERS, SIZE, QUERY = 4, 16, 16
SHAPE = ModelShape(layers=LAYERS, kv_heads=8, head_dim=64, dtype="float32", fingerprint="loop")
LAYER_NS = 5_000  # of a token at a layer
CHUNKS = [np.arange(128) + 1000 * n for n in range(3)]
TOKENS = sum(map(len, CHUNKS))
DISK = 2
GB = 10**9


class Time:
    """A clock that moves when something takes time."""

    def __init__(self):
        self.now = 1_000
        self._lock = threading.Lock()

    def __call__(self):
        return self.now

    def take(self, ns):
        with self._lock:
            self.now += int(ns)


class Paced:
    """A storage of a given speed."""

    def __init__(self, time):
        self.time = time
        self.rate = 0
        self.units = {}

    def write(self, key, slot, layers, memory, label):  # noqa: ARG002
        self.units[bytes(key)] = memory.clone()

    def read(self, key, slot, layers, memory):  # noqa: ARG002
        self.time.take(memory.nbytes * GB / self.rate)
        memory.copy_(self.units[bytes(key)][layers[0] : layers[1]])


def profile(**more):
    """Passes that take the same for each token, whatever is before them."""
    row = (LAYERS * LAYER_NS * 1.0, LAYERS * LAYER_NS * 1024.0)
    passes = PassTable((0, 1024), (1, 1024), (row, row))
    return Profile(cost=None, lanes={}, both={}, passes=passes, **more)


@pytest.fixture
def store(monkeypatch):
    time = Time()
    disk = Paced(time)
    tiers = [
        Tier("gpu", blocks=64),
        Tier("host", blocks=64),
        Tier("disk", blocks=256, read=Lane("disk read", 8e9)),
    ]
    manager = BlockManager(SHAPE, tiers, block_tokens=SIZE, policy="lru")
    pools = [*open_pools(SHAPE, tiers, SIZE)[:DISK], disk]
    with Executor(manager, pools, clock=time) as executor:
        store = CacheStore(executor, Given())
        # One reader: of several, the time of one's read would count with another's bytes.
        engine = LayerwiseEngine(executor, Layerwise(readers=1))
        monkeypatch.setattr(LayerwiseEngine, "of", lambda _: engine)
        yield store
        run_until_idle(executor)
        manager.audit()


def limit(store, rate):
    """Give the disk another speed."""
    store.executor.pools[DISK].rate = rate


def run_until_idle(executor):
    """Let time go on until all moves have ended: those in the background keep to budgets.

    It stands still while a move runs: the time that a thread needs is not time of the disk.
    """
    ledger = executor.runner.ledger
    while executor.poll():
        with ledger.section:
            if not ledger.schedule.running:
                executor.clock.take(100_000)


def request(store, controller, chunks, slower=1.0):
    """One fusion as a fusor makes it; the ratio, and where the chunks came from."""
    executor = store.executor
    from_tiers = Counter()
    with store.fetch_many(chunks) as fetch:
        for part in fetch.absent():
            zeros = torch.zeros(len(part.sequence) - part.start, 8, 64)
            for layer in range(LAYERS):
                fetch.write(part, layer, zeros, zeros)
            fetch.keep(part)
        ratio = controller.ratio(fetch, QUERY)
        computed = round(ratio * TOKENS) + QUERY
        for layer in range(LAYERS):
            assert fetch.wait(layer) == []  # `observe` gets the passes' times: none runs here
        for part in fetch.parts:
            from_tiers.update(part.tiers)
    controller.observe(
        round(slower * LAYERS * LAYER_NS * computed),
        pairs=LAYERS * computed,
        layers_full=0,
        tokens=TOKENS,
        query=QUERY,
    )
    run_until_idle(executor)
    store.place(CHUNKS, "disk")
    run_until_idle(executor)
    return ratio, from_tiers


def test_ratio_and_tier_follow_a_budget_that_falls_and_rises(store):
    controller = Controller(profile(), store)
    limit(store, 8 * GB)
    request(store, controller, CHUNKS)
    for _ in range(4):
        ratio, came = request(store, controller, CHUNKS)
        assert came == {"disk": TOKENS}
    assert ratio == controller.floor  # loads are short: .06 would hide
    assert controller.tier == store.tier == "disk"
    # Other work takes the disk away: recompute more, and keep new chunks where they hide.
    limit(store, GB)
    for _ in range(12):
        ratio, _ = request(store, controller, CHUNKS)
    per_layer = TOKENS * SHAPE.layer_bytes(1)
    wanted = (per_layer * GB / GB / LAYER_NS - QUERY) / TOKENS
    assert ratio == pytest.approx(wanted, rel=0.1)
    assert 0.6 < ratio < 0.9
    assert controller.tier == store.tier == "host"
    new = np.arange(64) + 9_000
    request(store, controller, [new])
    assert [found.tier for found in store.lookup([new]).found] == ["host"]
    limit(store, 8 * GB)
    for _ in range(60):  # the threads decide how many periods of the lane a request has
        ratio, _ = request(store, controller, CHUNKS)
        if ratio == controller.floor and controller.tier == "disk":
            break
    assert (ratio, controller.tier) == (controller.floor, "disk")


def test_passes_that_turn_out_slower_hide_more_loading(store):
    controller = Controller(profile(), store, floor=0)
    limit(store, 2 * GB)
    request(store, controller, CHUNKS)
    ratios = []
    for slower, requests in ((1.0, 6), (2.0, 12)):
        for _ in range(requests):
            ratio, _ = request(store, controller, CHUNKS, slower=slower)
        assert controller.pace == pytest.approx(slower, rel=0.02)
        recomputed_ns = slower * LAYER_NS * (QUERY + ratio * TOKENS) * (LAYERS - 1)
        assert recomputed_ns == pytest.approx(controller.estimate.load_ns, rel=0.05)
        ratios.append(ratio)
    assert ratios[1] < ratios[0]


def test_load_and_recomputation_are_those_of_the_pipeline(store):
    """All layers but the first load while all but the last run, with query and full layers."""
    controller = Controller(profile(), store, layers_full=1)
    full, chosen = TOKENS + QUERY, 0.15 * TOKENS + QUERY
    wanted = LAYER_NS * (full + 2 * chosen)
    assert controller.recompute_ns(0.15, TOKENS, QUERY) == pytest.approx(wanted)
    block = SHAPE.layer_bytes(SIZE)
    disk = 3 * 24 * block * GB / 8e9
    host = 3 * (24 * block * GB / 12e9 + 24 * 10_000 / LAYERS)
    assert controller.load_ns({"disk": 24}) == pytest.approx(max(disk, host))
    assert controller.load_ns({"host": 24}) == pytest.approx(host)
    assert controller.load_ns({"gpu": 24}) == 0
    measured = Controller(profile(device=Device(1e9, 1e12)), store, layers_full=1)
    moved = 3 * 2 * (TOKENS + QUERY) * SHAPE.layer_bytes(1) * GB / 1e9
    assert measured.recompute_ns(0.15, TOKENS, QUERY) == pytest.approx(wanted + moved)


def played(layer_ns, passes, waits, select_ns):
    """The end of each pass of a pipeline, and the arrival of each layer, step by step.

    The query's pass reads `waits` layers first; then `passes` recompute layer by layer.
    """
    arrivals = [(layer + 1) * layer_ns for layer in range(LAYERS)]
    at, ends = 0.0, []
    for arrival in arrivals[:waits]:
        at = max(at, arrival) + select_ns
    for arrival, took in zip(arrivals, passes, strict=True):
        at = max(at, arrival) + took
        ends.append(at)
    return ends, arrivals


@pytest.mark.parametrize("rate", [GB, 4 * GB])
def test_the_prediction_counts_layers_that_the_selection_waits_for(store, rate):
    """At r_eq the last layer arrives exactly when the passes before it end."""
    controller = Controller(profile(), store, floor=0)
    limit(store, rate)
    for _ in range(6):
        request(store, controller, CHUNKS)
    with store.fetch_many(CHUNKS) as fetch:
        blocks = Counter()
        for part in fetch.parts:
            blocks.update(part.blocks)
        for layer in range(LAYERS):
            fetch.wait(layer)
        run_until_idle(store.executor)  # a load that ends between two estimates changes the lane
        for waits in range(LAYERS + 1):
            controller.ratio(fetch, QUERY, waits=waits)
            found, layer_ns = controller.estimate, controller.load_ns(blocks) / (LAYERS - 1)
            select = controller.pace * LAYER_NS * QUERY
            each = controller.recompute_ns(found.r_eq, TOKENS, QUERY) / (LAYERS - 1)
            ends, arrivals = played(layer_ns, [each] * LAYERS, waits, select)
            if found.r_eq:
                assert found.r_eq < 1
                assert ends[-2] == pytest.approx(arrivals[-1], rel=1e-4)
            else:  # the query alone takes longer than the loads after the selection
                assert waits == LAYERS
                assert ends[-2] > arrivals[-1]
            stalled, _ = played(layer_ns, [0] * LAYERS, waits, select)
            assert found.wait_ns == pytest.approx(
                max(0.0, stalled[0] - layer_ns - waits * select), abs=1
            )


@pytest.mark.parametrize(("rate", "wanted"), [(64 * GB, 0.2), (GB // 10, 0.5)])
def test_ratios_are_from_floor_to_ceiling(store, rate, wanted):
    controller = Controller(profile(), store, floor=0.2, ceiling=0.5)
    limit(store, rate)
    for _ in range(12):
        ratio, _ = request(store, controller, CHUNKS)
    assert ratio == controller.estimate.ratio == wanted
    assert (controller.estimate.r_eq > 0.5) == (wanted == 0.5)


def test_chunks_that_are_not_used_again_go_to_the_cheapest_tier(store):
    controller = Controller(profile(), store)
    limit(store, GB)
    request(store, controller, CHUNKS)
    for _ in range(12):
        request(store, controller, CHUNKS)
    assert controller.tier == "host"
    for n in range(14):
        request(store, controller, [np.arange(128) + 2_000 * n + 100_000])
    assert controller.tier == "disk"


def test_what_cannot_be_is_refused(store):
    with pytest.raises(ConfigError, match="no passes"):
        Controller(Profile(cost=None, lanes={}, both={}), store)
    for wrong, message in (
        ({"floor": -1}, "floor is -1, 0 to 1"),
        ({"floor": 0.6, "ceiling": 0.5}, "floor is 0.6, above the ceiling 0.5"),
        ({"ceiling": 2}, "ceiling is 2, 0 to 1"),
        ({"ceiling": float("nan")}, "ceiling is nan"),
        ({"floor": "0.2"}, "floor is '0.2'"),
        ({"slack": -1}, "slack is -1"),
        ({"layers_full": 5}, "layers_full is 5, 0 to 4"),
        ({"layers_full": 1.5}, "layers_full is 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            Controller(profile(), store, **wrong)
    with pytest.raises(ConfigError, match="store is None"):
        Controller(profile(), None)
    with pytest.raises(ConfigError, match="profile is 'kv"):
        Controller("kvtrie.toml", store)
