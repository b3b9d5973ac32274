"""The eviction policy kvtrie inside vLLM's own manager of chunks, next to vLLM's policies."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from servers import BLOCK

pytestmark = pytest.mark.since("0.31")


class Manager:
    """vLLM's CPU manager with our policy, and the requests that it hears of."""

    def __init__(self, chunks):
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.context, self.key = ReqContext, make_offload_key
        self.manager = CPUOffloadingManager(
            chunks, "KvtrieCachePolicy", "kvtrie.engines.vllm.cache_policy"
        )

    def request(self, name, path, envelope=None, **params):
        context = self.context(name, {"kvtrie": params} if params else None, envelope)
        keys = []
        for at in range(len(path)):
            keys.append(self.key(b"%r" % (path[: at + 1],), 0))
            context.set_offload_key_position(keys[-1], (at + 1) * BLOCK)
        self.manager.on_new_request(context)
        return context, keys

    def serve(self, name, path, **params):
        """A request that loads what is there and stores the rest; how much it found."""
        context, keys = self.request(name, path, **params)
        found = 0
        for key in keys:
            if self.manager.lookup(key, context).name != "HIT":
                break
            found += 1
        if found:
            self.manager.prepare_load(keys[:found], context)
            self.manager.complete_load(keys[:found], context)
        out = self.manager.prepare_store(keys, context)
        if out is not None:
            self.manager.complete_store(out.keys_to_store, context)
        self.manager.on_request_finished(context)
        return found


def test_hints_of_requests_keep_and_drop_chunks():
    manager = Manager(12)
    manager.serve("system", [1, 2, 3, 4], retain=[{"start": 0, "end": 2 * BLOCK, "priority": 90}])
    for at in range(20):
        manager.serve(f"{at}", [100 + at, 0, 0])
    assert manager.serve("later", [1, 2, 3, 4]) == 2
    manager = Manager(12)
    manager.serve("a", [1, 2, 3, 4], end=True)
    manager.serve("b", [5, 6, 7, 8])
    manager.serve("c", [9, 10, 11, 12])
    manager.serve("d", [13, 14, 15, 16])
    assert manager.serve("b", [5, 6, 7, 8]) == 4


def envelope(*actions):
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    return KvHintsEnvelope(
        "1.0", "test", [KvHintAction("1", kind, "1.0", p) for kind, p in actions]
    )


def test_actions_of_an_envelope_keep_and_drop_chunks(monkeypatch):
    from kvtrie.engines.vllm import cache_policy

    lines = []
    log = SimpleNamespace(warning=lambda form, *given: lines.append(form % given))
    monkeypatch.setattr(cache_policy, "_LOG", log)
    manager = Manager(12)
    rows = [{"start": 0, "end": 2 * BLOCK, "priority": 90, "duration": 600}]
    retain = envelope(("kv.retain", {"directives": rows}))
    manager.serve("system", [1, 2, 3, 4], envelope=retain)
    for at in range(20):
        manager.serve(f"{at}", [100 + at, 0, 0])
    assert manager.serve("later", [1, 2, 3, 4]) == 2
    manager = Manager(12)
    manager.serve("a", [1, 2, 3, 4], envelope=envelope(("kv.release", {})))
    manager.serve("b", [5, 6, 7, 8])
    manager.serve("c", [9, 10, 11, 12])
    manager.serve("d", [13, 14, 15, 16])
    assert manager.serve("b", [5, 6, 7, 8]) == 4
    assert lines == []
    strange = envelope(
        ("kv.prefetch", {}),
        ("kv.release", {"session_id": "another"}),
        ("kv.retain", {"directives": [{"covers_output": True, "priority": 9}]}),
        ("kv.retain", {"directives": [{"priority": 101}]}),
    )
    manager.serve("e", [17, 18], envelope=strange, retain=[{"last": 3}])
    assert len(lines) == 5  # once each, however often the request is heard of
    assert all(line.startswith("kvtrie: request 'e': ignored: ") for line in lines)


def test_evict_is_all_or_nothing():
    manager = Manager(4)
    context, keys = manager.request("held", [1, 2, 3])
    manager.manager.prepare_store(keys, context)
    manager.manager.complete_store(keys, context)
    manager.manager.on_request_finished(context)
    manager.manager.prepare_load(keys[:1], context)
    policy = manager.manager._policy
    assert policy.evict(3, set()) is None
    assert policy.evict(1, set(keys)) is None
    assert [key for key, _ in policy.evict(2, set())] == [keys[2], keys[1]]
    assert policy.evict(0, set()) == []


@pytest.mark.parametrize("finished", [False, True])
def test_groups_of_layers_leave_from_the_end_of_a_sequence(finished):
    manager = Manager(9)
    context, keys = manager.request("a", [1, 2, 3])
    other = [manager.key(key[:-4], 1) for key in keys]
    for at, key in enumerate(other):
        context.set_offload_key_position(key, (at + 1) * BLOCK)
    manager.manager.prepare_store([*keys, *other], context)
    manager.manager.complete_store([*keys, *other], context)
    if finished:
        manager.manager.on_request_finished(context)
    for key, with_it in zip(reversed(keys), reversed(other), strict=True):
        assert {each for each, _ in manager.manager._policy.evict(2, set())} == {key, with_it}


def test_a_store_that_is_tried_again_is_not_part_of_another_requests():
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

    manager = Manager(4)
    first, (_, again) = manager.request("first", [1, 2])
    other, (between,) = manager.request("other", [3])
    policy = manager.manager._policy
    policy.on_store_miss([again], first)
    policy.on_store_miss([between], other)
    policy.insert(between, ChunkStatus(0), other)
    policy.insert(again, ChunkStatus(1), first)  # which has reported its miss before
    assert policy._new[again][1] == 2 * BLOCK
    assert policy._new[again][0] != policy._new[between][0]


def test_the_end_of_a_session_without_chunks_is_no_error():
    manager = Manager(3)
    context, keys = manager.request("a", [1, 2, 3], end=True)
    manager.manager.prepare_store(keys, context)
    manager.manager.complete_store(keys, context)
    assert len(manager.manager._policy.evict(3, set())) == 3
    manager.manager.on_request_finished(context)
    assert manager.manager._policy.boundary.failures == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_beside_vllms_own_policies(seed):
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    hits = {}
    for policy in ("kvtrie", "lru", "arc"):
        manager, draw, found = Manager(24), random.Random(seed), 0
        if policy != "kvtrie":
            manager.manager = CPUOffloadingManager(24, policy)
        for at in range(300):
            head = [draw.randrange(4)] * 4 if draw.random() < 0.5 else [at + 10]
            found += manager.serve(f"{at}", [*head, *(draw.randrange(2) for _ in range(3))])
        hits[policy] = found
    assert hits["kvtrie"] >= hits["lru"]


def test_a_manager_of_no_chunks_holds_and_stores_nothing():
    manager = Manager(0)
    for name in "abc":
        assert manager.serve(name, [1, 2, 3], retain=[{"priority": 90}]) == 0
    context, keys = manager.request("d", [1, 2, 3])
    out = manager.manager.prepare_store(keys, context)
    assert out is None or not out.keys_to_store
    manager.manager.on_request_finished(context)
    assert manager.manager._policy.boundary.failures == 0
