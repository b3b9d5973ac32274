"""The vLLM connector under random schedules of a naive engine that compares every block's bytes."""

import random

import pytest
import torch
from tests.engines.vllm_engine import Engine, PlayedRequest, play, served

from kvtrie.engines.vllm.messages import Opened
from kvtrie.engines.vllm.native_first import NativeFirst
from kvtrie.engines.vllm.restored import opened_tiers
from kvtrie.engines.vllm.settings import Settings
from kvtrie.errors import ConfigError
from kvtrie.tiers import EnginePool


@pytest.mark.grid
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_over_host(seed, ranks, ahead):
    engine = Engine("", ranks, ahead, seed)
    play(engine, 14, seed)
    engine.close()
    assert engine.served > 0
    assert engine.stored_blocks > 0
    assert engine.failed == 0


@pytest.mark.grid
@pytest.mark.parametrize("kinds", ["w", "s", "ws"])
@pytest.mark.parametrize(("ahead", "ranks"), [(0, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("disk", [False, True])
def test_random_schedules_of_windows_and_states(tmp_path, kinds, ahead, ranks, disk):
    found = 0
    for seed in range(4):
        folder = tmp_path if disk else ""
        engine = Engine(folder, ranks, ahead, seed % 2, host=6, kinds=kinds)
        play(engine, 14, seed % 2)
        engine.close()
        assert engine.served > 0
        assert engine.stored_blocks > 0
        assert engine.failed == 0
        found += engine.found
    assert found > 0


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kinds", "pages"),
    [
        ("w", (2, 1)),
        ("w", (1, 2)),
        ("n", (1, 4)),
        ("nws", (4, 1, 2, 1)),
    ],
)
@pytest.mark.parametrize(("ahead", "disk"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("format_", [None, "int8"])
def test_random_schedules_of_groups_whose_blocks_differ(
    tmp_path, kinds, pages, ahead, disk, format_
):
    found = 0
    for seed in range(4):
        folder, own = tmp_path if disk else "", {"kinds": kinds, "pages": pages}
        engine = Engine(folder, 1, ahead, seed % 2, host=6, format_=format_, **own)
        play(engine, 14, seed % 2)
        engine.close()
        assert engine.served > 0
        assert engine.stored_blocks > 0
        assert engine.failed == 0
        assert not engine.scheduler.cache.counters.lost["a promise that did not hold"]
        assert not engine.scheduler.cache.counters.lost["an unexpected error"]
        found += engine.found
    assert found > 0


@pytest.mark.parametrize("kinds", ["w", "ws"])
def test_stages_of_windows_and_states(tmp_path, kinds):
    found = 0
    for seed in range(3):
        engine = Engine(tmp_path, 1, 1, seed % 2, host=6, stages=2, kinds=kinds)
        assert (engine.scheduler.manager.stats().blocks > 0) == (seed > 0)
        play(engine, 14, seed % 2)
        engine.close()
        assert (engine.served > 0, engine.failed) == (True, 0)
        found += engine.found
    assert found > 0


def test_stages_with_other_numbers_of_layers_in_a_group_are_refused():
    model = served("ab", 1, 2, replicated=False, kinds="w")
    opened = {rank: Opened([1 << 20], [2, 1 + rank]) for rank in range(2)}
    settings = Settings.read({"tiers": [{"kind": "host", "bytes": "1MB"}]})
    with pytest.raises(ConfigError, match=r"\{0: \[2, 1\], 1: \[2, 2\]\} layers by rank"):
        opened_tiers(settings, model, opened, NativeFirst.of(settings, model))


@pytest.mark.grid
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_of_several_stages_and_of_latent_kv(tmp_path, stages, replicated):
    """Stages keep their own layers; latent KV is kept once for the ranks of a stage."""
    stored = 0
    for seed in range(4):
        host = 3 if replicated else 6
        engine = Engine(
            tmp_path, 2, seed % 2, seed % 2, host=host, stages=stages, replicated=replicated
        )
        tiers = engine.scheduler.manager.stats().tiers
        assert (tiers["host"].slots, tiers["disk"].slots) == (6, 128 if replicated else 64)
        assert (engine.scheduler.manager.stats().blocks > 0) == (seed > 0)
        play(engine, 14, seed % 2)
        with_disk = [worker.disk is not None for worker in engine.workers]
        assert with_disk == [True, not replicated] * stages
        if replicated:
            for first in range(0, 2 * stages, 2):
                one, other = (each.host.planes[0] for each in engine.workers[first : first + 2])
                assert one.data_ptr() != other.data_ptr()
                assert torch.equal(one, other)
        engine.close()
        assert engine.failed == 0
        assert engine.served > 0
        stored += engine.found
    assert stored > 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_random_schedules_over_host_and_disk_and_a_restart(tmp_path, ahead):
    for seed in range(4):
        engine = Engine(tmp_path, 1 + seed % 2, ahead, seed)
        before = engine.scheduler.manager.stats().blocks
        assert (before > 0) == (seed > 1)
        play(engine, 14, seed % 2)
        engine.close()
        assert engine.failed == 0
        assert engine.served > 0
        if seed > 1:
            assert engine.found > 0


@pytest.mark.parametrize("host", [3, 4, 6])
def test_who_waits_for_more_than_memory_holds_gives_up(tmp_path, host):
    """None of them brings up again and again what the others push out again."""
    for seed in range(6):
        engine = Engine(tmp_path / str(seed // 2), 1, seed % 3, seed, host)
        play(engine, 14, seed)
        engine.close()
        assert engine.failed == 0


def test_loads_that_fail_are_reported_and_never_committed(monkeypatch):
    copy, draw = EnginePool.copy_from, random.Random(0)

    def fail(self, *args):
        if draw.random() < 0.3:
            raise OSError("injected")
        copy(self, *args)

    monkeypatch.setattr(EnginePool, "copy_from", fail)
    failed = 0
    for seed in range(6):
        engine = Engine("", 1, seed % 2, seed)
        play(engine, 20, seed)
        engine.close()
        failed += engine.failed
    assert failed > 0


def test_requests_that_wait_for_the_disk_together_all_get_what_it_has(tmp_path):
    prompts = [[at, *range(20)] for at in range(4)]
    for again in range(2):
        engine = Engine(tmp_path, 1, 0, 0, host=24)
        if again:
            requests = [
                PlayedRequest(str(at), each, len(each), 1) for at, each in enumerate(prompts)
            ]
            found = [None] * 4
            for _ in range(3000):
                for at, one in enumerate(requests):
                    found[at] = engine.scheduler.match(one, 0) if found[at] is None else found[at]
                if None not in found:
                    break
                engine.step()
            # 20 blocks, of which 6 may be on their way at once.
            assert found == [20] * 4
            for one in requests:
                engine.scheduler.end(one)
        else:
            for at, each in enumerate(prompts):
                engine.add(str(at), each, 1)
                engine.drain()
        engine.drain()
        engine.close()
