"""KV events of host and disk, mixed with vLLM's own, counted by Dynamo's indexer.

The events go through vLLM's publisher to `python -m dynamo.indexer`, in the environment that
`make peers ARGS=dynamo` builds. Its counts are cumulative: those of a lower tier continue the
prefix of the tiers above.
"""

from __future__ import annotations

import json
import random
import subprocess
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import servers  # noqa: F401 - its settings first
from modelfree import SIZE, WORDS
from tests import namespace
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm_command import free_port
from vllm_events import engine_of
from vllm_schedules import model  # noqa: F401 - a fixture

PYTHON = Path(__file__).parents[2] / "benches" / "peers" / "envs" / "dynamo" / "bin" / "python"
BLOCKS = 6
POLLS = 5000

needs_dynamo = pytest.mark.skipif(
    not PYTHON.exists(), reason="Dynamo is not installed: make peers ARGS=dynamo"
)


@pytest.fixture
def network():
    """A network of this test alone: the indexer listens on all addresses."""
    if not namespace.possible():
        pytest.skip("no network namespace: unshare -n does not work here")
    with namespace.entered():
        yield


class Indexer:
    """A client of the indexer's HTTP interface."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        head = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, head)  # noqa: S310 - loopback
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return answer.read()

    def counts(self, tokens, instance):
        """Tokens on GPU, on CPU after those, and on disk after those."""
        answer = json.loads(self.call("/query", {"token_ids": tokens, "model_name": "m"}))
        found = answer["instances"].get(str(instance), {})
        return found.get("gpu", 0), found.get("cpu", 0), found.get("disk", 0)

    def register(self, instance, events, replay, size=SIZE):
        """Let it listen to the two ports of an instance with blocks of `size` tokens."""
        about = {"instance_id": instance, "model_name": "m", "block_size": size}
        about["endpoint"] = f"tcp://127.0.0.1:{events}"
        about["replay_endpoint"] = f"tcp://127.0.0.1:{replay}"
        self.call("/register", about)

    def unregister(self, instance):
        """Let it forget an instance."""
        self.call("/unregister", {"instance_id": instance, "model_name": "m"})

    def publish(self, batches, instance, tokens, size=SIZE):
        """Publish batches as an instance; the counts once all of them have been read."""
        events, replay = free_port(), free_port()
        publisher = ZmqEventPublisher(
            0, endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}", topic=""
        )
        try:
            for batch in batches:
                publisher.publish(batch)
            publisher._event_queue.join()
            self.register(instance, events, replay, size)
            before = None
            for _ in range(POLLS):  # an empty batch shows the gap, which the indexer then replays
                publisher.publish(KVEventBatch(ts=0.0, events=[]))
                found = self.counts(tokens, instance)
                if any(found) and found == before:
                    return found
                before = found
        finally:
            publisher.shutdown()
        raise AssertionError(f"the indexer counts {before}")


@contextmanager
def indexer():
    port = free_port()
    command = [PYTHON, "-m", "dynamo.indexer", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            client = Indexer(port)
            while child.poll() is None:
                try:
                    client.call("/health")
                    break
                except OSError:
                    continue
            yield client
        finally:
            child.terminate()


@needs_dynamo
@pytest.mark.usefixtures("network")
def test_the_indexer_counts_gpu_cpu_and_storage(model, tmp_path):  # noqa: F811
    draw = random.Random(3)
    prompt = [draw.randrange(WORDS) for _ in range(BLOCKS * SIZE + 1)]
    all_tokens = BLOCKS * SIZE
    with indexer() as client:
        engine, seen = engine_of(model, tmp_path / "kv", 0)
        engine.add("first", prompt, 2)
        engine.drain()
        engine.close()
        counts = client.publish(seen.batches, 1, prompt[:all_tokens])
        assert counts == (all_tokens, all_tokens, all_tokens)
        # On GPU half of the prompt, on CPU and disk all of it: their chains continue the GPU's.
        on_gpu = [keep_gpu(batch, BLOCKS // 2) for batch in seen.batches]
        counts = client.publish(on_gpu, 2, prompt[:all_tokens])
        assert counts == (all_tokens // 2, all_tokens, all_tokens)
        engine, seen = engine_of(model, tmp_path / "kv", 1)
        engine.add("again", prompt, 2)
        while "STORAGE" not in {event.medium for event in seen.events()}:
            engine.step()
        stored = [
            KVEventBatch(ts=batch.ts, events=[e for e in batch.events if e.medium == "STORAGE"])
            for batch in seen.batches
        ]
        engine.drain()
        engine.close()
        # After a restart the blocks on disk count without any on GPU or CPU.
        assert client.publish(stored, 3, prompt[:all_tokens]) == (0, 0, all_tokens)


def keep_gpu(batch, blocks):
    """A batch whose GPU events end after the first blocks of the prompt."""
    events = []
    for event in batch.events:
        if event.medium == "GPU":
            if event.parent_block_hash is not None:
                continue
            event.block_hashes = event.block_hashes[:blocks]
            event.token_ids = event.token_ids[: blocks * SIZE]
            event.extra_keys = event.extra_keys and event.extra_keys[:blocks]
        events.append(event)
    return KVEventBatch(ts=batch.ts, events=events)
