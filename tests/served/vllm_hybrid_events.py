"""KV events of models with several groups: routers count what a request finds below the GPU.

Routers count blocks of the layers that attend to all tokens. A request goes on only where the other
layers have their windows or states.
"""

from __future__ import annotations

import msgspec
import pytest
import servers
from servers import STATES, prompt
from tests.event_readers import LlmdReader, VllmReader
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm_indexer import indexer, needs_dynamo, network  # noqa: F401 - a fixture

pytestmark = pytest.mark.since("0.32")

LOWER = ["CPU", "STORAGE"]
MODELS = [  # whether there is a border at each block, and host memory for a few blocks
    pytest.param(servers.tiny_gemma, {}, True, "600KB", id="windows"),
    pytest.param(servers.tiny_gemma4, {}, True, "1MB", id="windows and blocks of half the tokens"),
    pytest.param(servers.tiny_qwen, STATES, False, "4MB", id="states"),
]
ARGUMENTS = ("made", "more", "dense", "host")


class Publisher:
    """Gives a reader each batch as vLLM encodes it."""

    def __init__(self):
        self.reader, self.batches = VllmReader(), []

    def publish(self, batch):
        self.reader.apply(b"", len(self.batches), msgspec.msgpack.Encoder().encode(batch))
        self.batches.append(batch)

    def shutdown(self):
        pass


def serve(made, tmp_path, tiers, **more):
    """A server whose events a reader gets."""
    publishing = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    extra = tiers | {"events": True}
    return servers.serve(made(tmp_path / "model"), extra, kv_events_config=publishing, **more)


def heard(server):
    """The reader of a server's events, from now on."""
    publisher = server.core.scheduler.kv_event_publisher = Publisher()
    return publisher


def lower(batches):
    """The batches without blocks on the GPU."""
    for batch in batches:
        events = [event for event in batch.events if getattr(event, "medium", "GPU") != "GPU"]
        yield KVEventBatch(ts=batch.ts, events=events)


@needs_dynamo
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(ARGUMENTS, MODELS)
def test_readers_count_up_to_the_border_that_a_repeat_finds(made, more, dense, host, tmp_path):
    del host
    with serve(made, tmp_path, servers.hybrid(tmp_path / "kv"), **more) as server:
        publisher = heard(server)
        block = server.kv_scheduler.cache.size
        first = prompt(0, 3 * block + 1)
        apart = prompt(1, block + 1, after=first[: 2 * block])
        server.answers([first])
        server.wait_for_stores()
        (size,) = {each.size for each in publisher.reader.groups.values() if each.whole}
        with indexer() as client:
            # vLLM publishes blocks on the GPU, whichever states it has.
            assert client.publish(publisher.batches, 1, first, size) == (3 * block,) * 3
            below = [*lower(publisher.batches)]
            assert client.publish(below, 2, first, size) == (0, 3 * block, 3 * block)
            # An index by blocks has no borders: it counts up to where prompts part.
            assert client.counts(apart, 2) == (0, 2 * block, 2 * block)
        llmd = LlmdReader(size)
        for batch in below:
            llmd.apply(b"kv@one@m", 0, msgspec.msgpack.encode(batch))
        for medium in LOWER:
            assert llmd.counts(first, medium, pod="one", model="m") == 3 * block
            assert llmd.counts(apart, medium, pod="one", model="m") == 2 * block
        borders = [3 * block, 2 * block if dense else 0]
        assert [publisher.reader.border(each, LOWER) for each in (first, apart)] == borders
        for each, border in zip((first, apart), borders, strict=True):
            server.forget()
            server.answers([each])
            assert server.found == border


@pytest.mark.parametrize(ARGUMENTS, MODELS)
def test_host_memory_counts_what_a_repeat_finds(made, more, dense, host, tmp_path):
    with serve(made, tmp_path, servers.hybrid(host=host), **more) as server:
        publisher = heard(server)
        block = server.kv_scheduler.cache.size
        blocks = 6 if dense else 3
        prompts = [prompt(seed, blocks * block + 1) for seed in range(4)]
        asked = []
        for each in [*prompts, *prompts[::-1], *prompts]:
            server.forget()
            counted = publisher.reader.counts(each, "CPU")
            server.answers([each])
            asked.append((counted, server.found))
            server.wait_for_stores()
        assert all(counted == found for counted, found in asked), asked
        assert {0, blocks * block} <= {found for _, found in asked}
