"""vLLM's OffloadingConnector with our spec: names, settings that are refused, and metrics."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import servers
import torch
from servers import STATES
from vllm_cache_policy import Manager
from vllm_disk_tier import run_idle_steps

from kvtrie.errors import ConfigError

pytestmark = pytest.mark.since("0.31")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


def test_the_plug_in_names_the_policy_for_vllms_own_spec(model):
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    with servers.serve(model):  # a server loads plug-ins
        pass
    assert CachePolicyFactory.get_cache_policy_cls("kvtrie").__name__ == "KvtrieCachePolicy"
    tier = SecondaryTierFactory.get_tier_class({"type": "kvtrie"})
    assert tier.__name__ == "KvtrieDiskTier"


def test_a_wrong_disk_ends_the_start():
    from kvtrie.engines.vllm.offloading import _with_tiers

    with pytest.raises(ConfigError, match="disk has no 'room'"):
        _with_tiers({"disk": {"path": "/kv", "room": 3}})
    with pytest.raises(ConfigError, match="needs a path"):
        _with_tiers({"disk": {"bytes": 1e9}})


def test_ignored_hints_and_contained_errors_are_exported():
    from kvtrie.engines.vllm.offloading import _COUNTED, KvtrieOffloadingSpec, _stats

    manager = Manager(12)
    boundary = manager.manager._policy.boundary
    stats = partial(_stats, lambda: None, [boundary], Counter())
    assert stats() is None
    manager.serve("a", [1], retain=[{"last": 3}], session=5)
    manager.manager._policy.touch([b"strange"], SimpleNamespace(req_id="b"))
    named = stats().data["data"]
    assert named == {name: {(): count} for name, count in zip(_COUNTED, (2, 1), strict=True)}
    assert stats() is None
    assert set(_COUNTED) <= set(KvtrieOffloadingSpec.build_metric_definitions({}))


@pytest.mark.parametrize("disk", [False, True])
def test_a_server_has_no_names_in_shared_memory_that_a_kill_would_leave(
    model, tmp_path, disk, logged
):
    names = ("vllm_offload_*", "kvtrie_weights_*")
    before = {file for name in names for file in Path("/dev/shm").glob(name)}  # noqa: S108 - vLLM's
    prompt = servers.prompt(1, 200)
    with servers.offload(model, servers.offloading(tmp_path if disk else None)) as server:
        assert {file for name in names for file in Path("/dev/shm").glob(name)} == before  # noqa: S108
        first = server.answers([prompt])
        steps = range(5000)
        # While stores are under way, vLLM keeps their blocks.
        assert any(server.llm.reset_prefix_cache() or server.llm.llm_engine.step() for _ in steps)
        assert server.answers([prompt]) == first
    assert not any("Failed to unlink" in line for line in logged)


def test_a_block_is_copied_in_the_tensors_of_its_group_only():
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvtrie.engines.vllm.offloading import PlainWorker

    tensors = [torch.full((4, 16), number, dtype=torch.int8) for number in (1, 2)]
    groups = [[(0, 16), (1, 16)], [(0, 8)]]  # tensors and bytes of a page
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(each, 16) for each in tensors],
        [[base.CanonicalKVCacheRef(*each) for each in refs] for refs in groups],
    )
    host = []

    def view(size):
        host.append(torch.zeros((3, size), dtype=torch.int8))
        return host[-1]

    worker = PlainWorker(caches, 2, SimpleNamespace(create_next_worker_view=view))
    # The second block of chunk 0 of the first group, the first one of chunk 2 of the second.
    blocks = base.GPULoadStoreSpec([3, 1], group_sizes=[1, 1], block_indices=[5, 2])
    worker.submit_store(1, blocks, CPULoadStoreSpec([0, 2]))
    assert host[0].tolist() == [[0] * 16 + [1] * 16, [0] * 32, [1] * 8 + [0] * 24]
    assert host[1].tolist() == [[0] * 16 + [2] * 16, [0] * 32, [0] * 32]
    for each in tensors:
        each.zero_()
    worker.submit_load(2, CPULoadStoreSpec([0, 2]), blocks)
    assert tensors[0].tolist() == [[0] * 16, [1] * 8 + [0] * 8, [0] * 16, [1] * 16]
    assert tensors[1].tolist() == [[0] * 16] * 3 + [[2] * 16]
    assert [each.job_id for each in worker.get_finished()] == [1, 2]


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.since("0.33")
def test_a_load_inside_a_step_goes_before_others(model, tmp_path, disk, monkeypatch):
    from kvtrie.engines.vllm.offloading import PlainWorker

    load, expedited = PlainWorker.submit_load, []

    def submit(self, *given, **more):
        expedited.append(more.get("expedited", False))
        return load(self, *given, **more)

    monkeypatch.setattr(PlainWorker, "submit_load", submit)
    more = {"cpu_bytes_to_use": 8 << 20, "sync_load_budget_bytes": 1 << 30}
    extra = servers.offloading(tmp_path if disk else None, **more)
    prompt = servers.prompt(1, 200)
    with servers.offload(model, extra) as server:
        first = server.answers([prompt])
        assert any(
            server.llm.reset_prefix_cache() or server.llm.llm_engine.step() for _ in range(5000)
        )
        servers.same(server.answers([prompt]), first)
        assert server.found > 0
    assert expedited == [True]


def later(model, extra, prompts, **more):
    """Answers and tokens found of each round but the first; a disk has two servers."""
    made = []
    for _ in range(2 if "disk" in extra else 1):
        with servers.offload(model, extra, **more) as server:
            for _ in range(2):
                answers, found = [], []
                for each in prompts:
                    answers += server.answers([each], tokens=20)
                    found.append(server.found)
                    run_idle_steps(server)
                    server.forget()
                made.append((answers, found))
    return made[1:]


@pytest.mark.parametrize(
    ("kind", "disk", "per_chunk"),
    [
        ("gemma", False, 1),
        ("gemma", True, 1),
        ("gemma", True, 2),
        ("gemma4", True, 1),
        ("gpt_oss", False, 2),
    ],
)
def test_windows_come_back(kind, disk, per_chunk, tmp_path):
    model = getattr(servers, f"tiny_{kind}")(tmp_path / "model")
    first = servers.prompt(0, 300)
    prompts = [first, *(first[:200] + servers.prompt(seed, 60 + seed) for seed in range(1, 5))]
    with servers.serve(model) as server:
        wanted = [server.answers([each], tokens=20)[0] for each in prompts]
        size = server.core.scheduler.block_size * per_chunk
    # Over a disk, host memory is too small for all prompts.
    room = (2 if kind == "gemma4" else 1) if disk else 8
    more = {"cpu_bytes_to_use": room << 20, "blocks_per_chunk": per_chunk}
    extra = servers.offloading(tmp_path / "kv" if disk else None, **more)
    for answers, found in later(model, extra, prompts):
        servers.same(answers, wanted)
        assert found == [(len(each) - 1) // size * size for each in prompts]


@pytest.mark.parametrize("disk", [False, True])
def test_states_come_back(disk, tmp_path):
    """Compared with vLLM's own hit at the same border: a cold run may differ in bfloat16."""
    model, own = servers.tiny_qwen(tmp_path / "model"), []
    prompts = [servers.prompt(seed, 1000 + 300 * seed) for seed in range(4)]
    with servers.serve(model, blocks=60, **STATES) as server:
        size = server.core.scheduler.block_size
        for each in prompts:
            server.answers([each])
            own += server.answers([each], tokens=20)
    more = {"cpu_bytes_to_use": (3 if disk else 32) << 20}
    extra = servers.offloading(tmp_path / "kv" if disk else None, **more)
    for answers, found in later(model, extra, prompts, **STATES):
        assert answers == own
        assert found == [(len(each) - 1) // size * size for each in prompts]
