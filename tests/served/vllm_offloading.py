"""vLLM's OffloadingConnector with our spec: names, settings that are refused, and metrics."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import servers
from vllm_cache_policy import Manager

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
