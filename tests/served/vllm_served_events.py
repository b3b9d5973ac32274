"""KV events of a served vLLM with host and disk, as three readers count them.

Dynamo's indexer, llm-d's index and a reader of vLLM's form listen to one server while it fills,
evicts, resets its cache and restarts. The prompts have five blocks; the GPU has 23, host memory 12,
and disk has all. All processes run in a network of their test.
"""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
import servers
from servers import BLOCK, prompt
from tests.event_readers import MEDIUMS, LlmdReader, Subscriber, VllmReader
from vllm_command import Command, free_port, with_words
from vllm_indexer import indexer, needs_dynamo, network  # noqa: F401 - a fixture

BLOCKS = 5
ALL = BLOCKS * BLOCK
PROMPTS = [prompt(seed, ALL + 1) for seed in range(6)]
EVERYWHERE, ON_HOST, ON_DISK, NOTHING = (ALL, ALL, ALL), (0, ALL, ALL), (0, 0, ALL), (0, 0, 0)
POLLS = 300  # of 100 ms at most

pytestmark = needs_dynamo


class Deployment:
    """A server's ports, the indexer, and two more readers."""

    def __init__(self, client, folder, model):
        self.indexer, self.model, self.events, self.replay = client, model, free_port(), free_port()
        rows = [{"kind": "host", "blocks": 12}]
        rows.append({"kind": "disk", "blocks": 64, "path": str(folder / "kv")})
        self.extra = {"tiers": rows, "events": True}

    def serve(self, *arguments):
        """A server that publishes to these ports."""
        transfer = {"kv_connector": "KvtrieConnector", "kv_role": "kv_both"}
        transfer["kv_connector_extra_config"] = self.extra
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@one@m"}
        events["endpoint"] = f"tcp://*:{self.events}"
        events["replay_endpoint"] = f"tcp://*:{self.replay}"
        more = ["--kv-events-config", json.dumps(events), "--num-gpu-blocks-override", "24"]
        more += ["--host", "127.0.0.1", "--served-model-name", "m", *arguments]
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
        return Command(self.model, json.dumps(transfer), *more, **variables)

    def register(self):
        self.indexer.register(1, self.events, self.replay, BLOCK)

    def listen(self, stack):
        """Let the two readers listen."""
        endpoints = [f"tcp://127.0.0.1:{port}" for port in (self.events, self.replay)]
        self.readers = [
            stack.enter_context(Subscriber(reader, *endpoints, topic=b"kv@"))
            for reader in (VllmReader(), LlmdReader(BLOCK))
        ]

    def counts(self):
        """For each prompt what the indexer counts, and the reader of vLLM's form; its blocks."""
        vllm = self.readers[0].reader
        blocks = [len(vllm.names(medium)) for medium in MEDIUMS]
        prompts = [each[:ALL] for each in PROMPTS]
        counted = [self.indexer.counts(each, 1) for each in prompts]
        return counted, [vllm.continued(each) for each in prompts], blocks

    def await_counts(self, wanted, blocks, indexed=None):
        """Wait until each prompt counts as wanted on GPU, CPU after it, and disk after that.

        Args:
            wanted: tokens by medium, for each prompt.
            blocks: blocks by medium.
            indexed: what the indexer counts instead.
        """
        for _ in range(POLLS):
            for each in self.readers:
                each.pump(50)
            if self.counts() == (indexed or wanted, wanted, blocks):
                break
        assert self.counts() == (indexed or wanted, wanted, blocks)
        self.check_llmd()

    def check_llmd(self):
        """llm-d's index has by tier what the reader of vLLM's form has by medium."""
        vllm, llmd = [each.reader for each in self.readers]
        for each in PROMPTS:
            for medium in MEDIUMS:
                found = llmd.counts(each[:ALL], medium, pod="one", model="m")
                assert found == vllm.counts(each[:ALL], medium), medium


@pytest.fixture
def deployment(network, tmp_path):  # noqa: ARG001, F811
    model = with_words(servers.tiny_llama(tmp_path / "model"))
    with indexer() as client:
        yield Deployment(client, tmp_path, model)


def test_counts_follow_a_server_past_eviction_reset_and_restart(deployment):
    with ExitStack() as stack:
        first = stack.enter_context(deployment.serve())
        deployment.register()
        deployment.listen(stack)
        for at, blocks in enumerate([[5, 5, 5], [10, 10, 10], [15, 12, 15], [20, 12, 20]]):
            assert first.ask(PROMPTS[at], 2)[1] == 0
            deployment.await_counts([EVERYWHERE] * (at + 1) + [NOTHING] * (5 - at), blocks)
        assert first.ask(PROMPTS[4], 2)[1] == 0
        # It took the last three blocks of the first prompt from the GPU.
        evicted = [(2 * BLOCK, 2 * BLOCK, ALL), *[EVERYWHERE] * 4, NOTHING]
        deployment.await_counts(evicted, [22, 12, 25])

        first.get("/reset_prefix_cache", "POST")
        below = [ON_DISK, ON_DISK, (0, 2 * BLOCK, ALL), ON_HOST, ON_HOST, NOTHING]
        deployment.await_counts(below, [0, 12, 25])
        assert first.ask(PROMPTS[0], 2)[1] == ALL
        before = [EVERYWHERE, ON_DISK, ON_DISK, (0, 2 * BLOCK, ALL), ON_HOST, NOTHING]
        deployment.await_counts(before, [5, 12, 25])
        first.end()

        second = stack.enter_context(deployment.serve())
        for each in deployment.readers:
            each.await_connections(2)
        assert second.ask(PROMPTS[5], 2)[1] == 0
        # The indexer ignores numbers that it has had: it counts what the first server had.
        after = [ON_DISK] * 5 + [EVERYWHERE]
        deployment.await_counts(after, [5, 5, 30], indexed=before)
        assert [each.forgot for each in deployment.readers] == [1, 1]
        deployment.indexer.unregister(1)
        deployment.register()
        assert second.ask(PROMPTS[1], 2)[1] == ALL  # its batch makes the indexer ask for the others
        after[1] = EVERYWHERE
        deployment.await_counts(after, [10, 10, 30])

        second.get("/reset_prefix_cache?reset_external=true", "POST")
        deployment.await_counts([NOTHING] * 6, [0, 0, 0])
        assert second.ask(PROMPTS[1], 2)[1] == 0
        deployment.await_counts([NOTHING, EVERYWHERE, *[NOTHING] * 4], [5, 5, 5])
