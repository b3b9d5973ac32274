"""KV events of host and disk in vLLM's real scheduler: hashes, order and encoding are vLLM's."""

from __future__ import annotations

import random

import msgspec
import pytest
import servers  # its settings first
import torch
from modelfree import SIZE, WORDS, Engine
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_schedules import model, play, tiers  # noqa: F401 - a fixture

from kvtrie.engines.vllm.media import name_by_content
from kvtrie.engines.vllm.metrics import MetricsExporter


class Publisher:
    """Takes batches through vLLM's encoder and decoder, and follows what is where, by group."""

    def __init__(self):
        self.resident = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.ever = {medium: set() for medium in self.resident}
        self.facts = {}
        self.runs = 0
        self.batches = []

    def publish(self, batch):
        self.batches.append(batch)
        data = msgspec.msgpack.Encoder().encode(batch)
        for event in msgspec.msgpack.Decoder(KVEventBatch).decode(data).events:
            if not hasattr(event, "medium"):
                self.resident["GPU"].clear()
                continue
            assert event.locality is None
            assert event.ownership is None
            assert all(isinstance(name, int) for name in event.block_hashes)
            names = {(event.group_idx, name) for name in event.block_hashes}
            if not isinstance(event, BlockStored):
                self.resident[event.medium] -= names
                continue
            self.note(event)
            self.resident[event.medium] |= names
            self.ever[event.medium] |= names
            self.runs += len(names) > 1 and event.medium != "GPU"

    def names(self, medium, group=0):
        """The names of a group's blocks that were ever on a medium."""
        return {name for at, name in self.ever[medium] if at == group}

    def events(self):
        return [event for batch in self.batches for event in batch.events]

    def note(self, event):
        """Compare a block's facts with those of its first event, on whichever medium."""
        size, names = event.block_size, [event.parent_block_hash, *event.block_hashes]
        kind = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        assert self.facts.setdefault(event.group_idx, kind) == kind, event.medium
        if len(event.token_ids) > size * len(event.block_hashes):
            assert event.medium == "GPU"  # vLLM leaves blocks out that it does not keep
            return
        assert len(event.token_ids) == size * len(event.block_hashes)
        known = {name for resident in self.resident.values() for _, name in resident}
        assert names[0] is None or names[0] in known
        for at, name in enumerate(event.block_hashes):
            keys = event.extra_keys and event.extra_keys[at]
            tokens = event.token_ids[at * size : (at + 1) * size]
            facts = (names[at], tokens, keys, event.lora_id, event.lora_name)
            assert self.facts.setdefault((size, name), facts) == facts, event.medium

    def shutdown(self):
        pass


def engine_of(model, folder, seed, *, host=40):  # noqa: F811
    engine = Engine(
        model, tiers(folder, host) | {"events": True}, blocks=40, seed=seed, events=True
    )
    engine.scheduler.kv_event_publisher = Publisher()
    engine.scheduler.max_num_encoder_input_tokens = 100
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(100)
    return engine, engine.scheduler.kv_event_publisher


def kinds(folder):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")
    return {
        "plain": {},
        "salted": {"cache_salt": "s"},
        "adapter": {"lora_request": LoRARequest("l", 1, str(folder))},
        "image": {"mm_features": [image("first", 5), image("second", 2 * SIZE)]},
    }


def image(name, offset, length=20):
    """An input as vLLM's engine has it, whose one tensor is its name."""
    place = PlaceholderRange(offset=offset, length=length)
    tensor = torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8)
    element = MultiModalFieldElem(tensor, MultiModalSharedField(batch_size=1))
    feature = MultiModalFeatureSpec(MultiModalKwargsItem({"pixels": element}), "image", name, place)
    name_by_content(feature)
    return feature


def test_hashes_are_vllms_before_and_after_a_restart(model, tmp_path):  # noqa: F811
    draw = random.Random(0)
    prompt = [draw.randrange(WORDS) for _ in range(6 * SIZE + 1)]
    for again in range(2):
        engine, seen = engine_of(model, tmp_path / "kv", again)
        wanted = {}
        for kind, more in kinds(tmp_path / "adapter").items():
            engine.add(kind, prompt, 2, **more)
            names = engine.prompts[kind][2].block_hashes[:6]
            wanted[kind] = {maybe_convert_block_hash(name) for name in names}
            if again and kind == "plain":
                for _ in range(3):
                    engine.step()
                assert wanted[kind] <= seen.names("STORAGE")
            engine.drain()
        engine.close()
        assert len(set.union(*wanted.values())) == 24
        for names in wanted.values():
            assert names <= seen.names("CPU")
            assert names <= seen.names("STORAGE")
        everything = seen.names("CPU") | seen.names("STORAGE")
        assert everything <= set.union(*wanted.values())
        assert engine.kv_scheduler.cache.published.unknown == 18 * again
        engine.kv_scheduler._exported_at = 0
        engine.kv_scheduler.counts(MetricsExporter())
        assert engine.kv_scheduler.cache.counters.lost["an event without a hash"] == 18 * again
        assert seen.runs > 0


@pytest.mark.since("0.32")
@pytest.mark.parametrize(
    ("made", "kind", "tokens", "more"),
    [
        (servers.tiny_gemma, ("sliding_window", 64), 600, {}),
        (servers.tiny_gemma4, ("sliding_window", 80), 600, {}),
        (
            servers.tiny_qwen,
            ("mamba", None),
            1400,
            {"dtype": "bfloat16", "block_size": None, "max_model_len": 2560},
        ),
    ],
)
def test_events_name_the_group_of_layers_as_vllms_own_do(tmp_path, made, kind, tokens, more):
    host, disk = {"kind": "host", "bytes": "64MB"}, {"kind": "disk", "bytes": "256MB"}
    extra = {"tiers": [host, disk | {"path": str(tmp_path / "kv")}], "events": True}
    publishing = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    more |= {"kv_events_config": publishing}
    folder = made(tmp_path / "model")
    with servers.serve(folder, extra, **more) as server:
        seen = server.core.scheduler.kv_event_publisher = Publisher()
        server.answers([servers.prompt(0, tokens)])
        server.wait_for_stores()
        # Windows that no resume point needs are on host only.
        assert seen.resident["STORAGE"] == seen.resident["GPU"] <= seen.resident["CPU"]
        first, *others = server.core.scheduler.connector._model.groups
        assert {name for _, name in seen.resident["CPU"]} == seen.names("GPU", first.number)
        assert seen.facts[first.number] == ("full_attention", None)
        assert {seen.facts[group.number] for group in others} == {kind}
        assert {number for number, _ in seen.resident["CPU"]} == {*range(1 + len(others))}
        on_disk = {*seen.resident["STORAGE"]}
    with servers.serve(folder, extra, **more) as server:
        seen = server.core.scheduler.kv_event_publisher = Publisher()
        server.answers([servers.prompt(1, 2)])
        assert seen.resident["STORAGE"] == on_disk
        server.core.scheduler.reset_prefix_cache(reset_connector=True)
        server.answers([servers.prompt(1, 2)])
        assert seen.resident["STORAGE"] == set()


@pytest.mark.parametrize("host", [8, 30])
def test_random_stores_and_evictions_publish_no_child_before_its_parent(model, tmp_path, host):  # noqa: F811
    for seed in range(3):
        engine, seen = engine_of(model, tmp_path / str(seed // 2), seed, host=host)
        play(engine, seed % 2)
        engine.close()
        assert seen.ever["CPU"]
        assert seen.ever["STORAGE"]
