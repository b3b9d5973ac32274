"""Random schedules of vLLM's real scheduler, every row of every block compared."""

from __future__ import annotations

import itertools
import random

import pytest
import servers  # noqa: F401 - its settings first
from modelfree import LAYERS, PAGE, SIZE, WORDS, Engine, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model's configuration."""
    return write_model(tmp_path_factory.mktemp("model"))


def tiers(folder, host, kinds=""):
    block = 4 * PAGE * len(LAYERS)
    size = block * (1 + len(kinds) + kinds.count("n"))
    room = {"bytes": host * size} if kinds else {"blocks": host}
    rows = [{"kind": "host", **room}]
    if folder:
        room = {"bytes": (1 << 22) + 200 * size} if kinds else {"blocks": 200}
        rows.append({"kind": "disk", **room, "path": str(folder)})
    return {"tiers": rows}


def play(engine, seed, requests=24, aborts=0.05):
    """Conversations over three beginnings, pairs at once; aborts and resets at any moment."""
    draw = random.Random(seed)
    heads = [[draw.randrange(WORDS) for _ in range(5 * SIZE)] for _ in range(3)]
    for at in range(requests):
        head = draw.choice(heads)[: draw.randint(1, 5 * SIZE)]
        prompt = [*head, *(draw.randrange(WORDS) for _ in range(draw.randint(1, 2 * SIZE)))]
        for copy in range(1 + (draw.random() < 0.3)):
            salt = draw.choice(["x", None, None])
            engine.add(f"{at}-{copy}", prompt, draw.randint(1, 40), cache_salt=salt)
        for _ in range(draw.randint(1, 12)):
            engine.step()
            if engine.prompts and draw.random() < aborts:
                engine.abort(draw.choice(list(engine.prompts)))
            if draw.random() < 0.02:
                engine.scheduler.reset_prefix_cache()
        if at % 8 == 0:
            engine.kv_scheduler.manager.audit()
    engine.drain()


KINDS = {
    "plain": {},
    "ahead": {"ahead": True},
    "drafts": {"drafts": True},
    "ranks": {"ranks": 2, "ahead": True},
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [16, 24])
def test_random_schedules(model, tmp_path, kind, blocks, deep):
    found = rejected = 0
    for seed in range(3):
        folder = tmp_path / str(seed // 2) if deep else ""  # the second run finds the first one's
        extra = tiers(folder, host=12 if deep else 30)
        engine = Engine(model, extra, blocks=blocks, seed=seed, **KINDS[kind])
        play(engine, seed % 2)
        engine.close()
        assert engine.right > 15
        assert not engine.wrong
        found += (
            engine.kv_scheduler.cache.counters.tokens["host"]
            + engine.kv_scheduler.cache.counters.tokens["disk"]
        )
        rejected += engine.rejected
    assert found > 10 * SIZE
    assert (rejected > 0) == (kind == "drafts")


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        *itertools.product(["w", "n", "s", "nws"], ["plain", "ahead"]),
        ("nw", "drafts"),
        ("nws", "ranks"),
    ],
)
def test_random_schedules_of_groups(model, tmp_path, kinds, kind, deep):
    found = 0
    for seed in range(3):
        folder = tmp_path / str(seed // 2) if deep else ""
        extra = tiers(folder, 12 if deep else 30, kinds)
        blocks = 13 * (1 + len(kinds) + kinds.count("n"))
        more = {"policy": "recompute", "kinds": kinds, **KINDS[kind]}
        engine = Engine(model, extra, blocks=blocks, seed=seed, **more)
        play(engine, seed % 2)
        engine.close()
        assert engine.right > 15
        assert not engine.wrong
        tokens = engine.kv_scheduler.cache.counters.tokens
        found += tokens["host"] + tokens["disk"]
    assert found > 5 * SIZE


def fail_writes(monkeypatch, first):
    """Let every write of a disk fail from the `first`th on."""
    from kvtrie.errors import TransferError
    from kvtrie.tiers import DiskStorage

    write, write_many, seen = DiskStorage.write, DiskStorage.write_many, itertools.count(1)

    def one(self, *given):
        if next(seen) >= first:
            raise TransferError("no space left on the device")
        write(self, *given)

    def many(self, blocks):
        good = [block for block in blocks if next(seen) < first]
        return write_many(self, good) + ["no space left"] * (len(blocks) - len(good))

    monkeypatch.setattr(DiskStorage, "write", one)
    monkeypatch.setattr(DiskStorage, "write_many", many)


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_over_a_disk_that_fails(model, tmp_path, kind, monkeypatch, logged):
    draw, ranks = random.Random(kind), KINDS[kind].get("ranks", 1)
    for seed in range(3):
        logged.clear()
        with monkeypatch.context() as patches:
            fail_writes(patches, draw.randrange(1, 40))
            extra = tiers(tmp_path / str(seed // 2), host=12)
            engine = Engine(model, extra, blocks=16, seed=seed, **KINDS[kind])
            play(engine, seed)
            failed = engine.kv_scheduler.manager.stats().tiers["disk"].failed
            engine.close()
        assert engine.right > 15
        assert not engine.wrong
        assert failed > 0
        lines = [line for line in logged if "not stored" in line]
        assert ranks <= len(lines) <= 2 * ranks  # one per rank, and call of the storage


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_loads_that_fail(model, policy, monkeypatch):
    from kvtrie.tiers import EnginePool

    copy, draw = EnginePool.copy_from, random.Random(0)

    def fail(self, *args):
        if draw.random() < 0.6:
            raise OSError("injected")
        copy(self, *args)

    monkeypatch.setattr(EnginePool, "copy_from", fail)
    failed = 0
    for seed in range(3):
        engine = Engine(model, tiers("", 30), blocks=16, seed=seed, policy=policy)
        play(engine, seed)
        engine.close()
        assert engine.right > 5
        failed += engine.kv_scheduler.cache.counters.lost["a load that failed"]
        assert policy == "fail" or not engine.wrong
    assert failed > 0
