"""`kvtrie advise` over vLLM's real scheduler and publisher: servers find what it predicts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
import pytest
import servers  # its settings first
from modelfree import SIZE, WORDS, Engine
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm_schedules import model  # noqa: F401 - a fixture

from kvtrie import ModelShape
from kvtrie.advise.groups import grouping
from kvtrie.advise.listen import listening
from kvtrie.advise.model_folder import folder_shape
from kvtrie.advise.predict import Setting, play
from kvtrie.advise.rebuild import Rebuilt
from kvtrie.advise.window import Window
from kvtrie.advise.wire import Reader

GPU = 64
MODEL = ModelShape(layers=2, kv_heads=1, head_dim=2)
NS = 10**9
LONGEST = 600


@dataclass
class Asked:
    """A request: when, in seconds, what, and how many tokens are wanted."""

    at: float
    prompt: list
    tokens: int


def chats(seed=1, number=12, turns=7):
    """Chats that share a system prompt; a turn has all turns before it."""
    draw = random.Random(seed)
    system = words(draw, 48)
    paths = [[] for _ in range(number)]
    order = [chat for chat in range(number) for _ in range(turns)]
    draw.shuffle(order)
    for turn, chat in enumerate(order):
        paths[chat] += words(draw, draw.randint(2 * SIZE, 75))
        yield Asked(20.0 * turn, [*system, *paths[chat]], draw.randint(1, 24))


def agents(seed=2, number=6, steps=20):
    """Agents with the same tools, whose steps add results, some of them long."""
    draw = random.Random(seed)
    tools = words(draw, 160)
    paths = [words(draw, 40) for _ in range(number)]
    order = [agent for agent in range(number) for _ in range(steps)]
    draw.shuffle(order)
    for step, agent in enumerate(order):
        if len(tools) + len(paths[agent]) > LONGEST - 96:
            paths[agent] = words(draw, 40)
        paths[agent] += words(draw, draw.choice((2 * SIZE, 48, 96)))
        yield Asked(6.0 * step, [*tools, *paths[agent]], draw.randint(4, 20))


def words(draw, number):
    return [draw.randrange(WORDS) for _ in range(number)]


class Publisher:
    """Keeps batches as vLLM encodes them, at the workload's time."""

    def __init__(self):
        self.reader, self.batches, self.now = Reader(), [], 0.0

    def publish(self, batch):
        payload = msgspec.msgpack.Encoder().encode(batch)
        number = len(self.batches)
        read = self.reader.read([b"", number.to_bytes(8, "big"), payload])
        self.batches.append(replace(read, at=self.now))

    def shutdown(self):
        pass


def serve(model, workload, host, policy="lru"):  # noqa: F811
    """Tokens of each prompt, found on the GPU and found on host; and the batches of events."""
    extra = {"tiers": [{"kind": "host", "blocks": host}], "policy": policy}
    engine = Engine(model, extra, blocks=GPU, events=True)
    publisher = engine.scheduler.kv_event_publisher = Publisher()
    found, on_output = [], engine.on_output

    def seen(output):
        if (stats := output.prefill_stats) is not None:
            local, below = stats.num_local_cached_tokens, stats.num_external_cached_tokens
            found.append((stats.num_prompt_tokens, local, below))
        on_output(output)

    engine.on_output = seen
    for number, asked in enumerate(workload):
        publisher.now = asked.at
        engine.add(str(number), asked.prompt, asked.tokens)
        engine.drain()
    engine.close()
    return found, publisher.batches


def share_found(found, workload):
    """The share of prompt tokens that host memory had, in the last third of the time."""
    since = workload[-1].at * 2 / 3
    counted = [one for one, asked in zip(found, workload, strict=True) if asked.at >= since]
    return sum(one[2] for one in counted) / sum(one[0] for one in counted)


def predicted(batches, workload, host, policy):
    """The same, from the events of a server without host memory."""
    rebuilt = Rebuilt()
    for batch in batches:
        rebuilt.add(batch)
    since = workload[-1].at * 2 / 3
    block = MODEL.block_bytes(SIZE)
    setting = Setting((GPU - 1) * block, host * block, policy=policy)
    played = play(
        rebuilt.requests(), setting, model=MODEL, block_tokens=SIZE, since=round(since * NS)
    )
    prompts = sum(len(asked.prompt) for asked in workload if asked.at >= since)
    return played.found[:, 1:].sum() / prompts


@pytest.mark.parametrize("make", [chats, agents])
def test_predictions_are_what_servers_find(model, make):  # noqa: F811
    workload = list(make())
    _, batches = serve(model, workload, 1)  # a block below is none
    for policy, host in (("lru", 160), ("learned", 96)):
        found, _ = serve(model, workload, host, policy)
        real, guess = share_found(found, workload), predicted(batches, workload, host, policy)
        assert real > 0.05
        assert abs(real - guess) <= 0.02


def asked_thrice(server, tokens, publisher=None):
    """Ask six prompts three times; returns the share of their tokens found the last time."""
    found = []
    for turn in range(18):
        if publisher is not None:
            publisher.now = 60.0 * turn
        server.answers([servers.prompt(turn % 6, tokens + turn % 6)], tokens=1)
        found.append(server.found)
        if publisher is None:
            server.wait_for_stores()
    return sum(found[12:]) / sum(tokens + seed for seed in range(6))


@pytest.mark.parametrize(
    ("make", "tokens", "border", "more"),
    [
        (servers.tiny_gemma, 300, 32, {"blocks": 44}),
        (servers.tiny_gemma4, 500, 64, {"blocks": 60}),
        (servers.tiny_qwen, 1500, 640, {"blocks": 24, **servers.STATES}),
    ],
)
def test_a_hybrid_server_finds_what_its_events_and_folder_predict(
    tmp_path, make, tokens, border, more
):
    folder = tmp_path / "model"
    path = make(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = more.get("dtype", "float32")  # as the server keeps KV
    (folder / "config.json").write_text(json.dumps(config))
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with servers.serve(path, kv_events_config=events, **more) as server:
        publisher = server.core.scheduler.kv_event_publisher = Publisher()
        alone = asked_thrice(server, tokens, publisher)
        (size,) = {one.size for one in server.core.scheduler.kv_cache_config.kv_cache_tensors}
    window = Window()
    window.add_all(publisher.batches)
    played = grouping(folder_shape(folder), window.groups, window.rebuilt.size)
    assert (played.block_tokens, played.page * more["blocks"]) == (border, size)
    setting = Setting(size, 2**30, policy="lru")
    guess = play(
        played.requests(window.rebuilt.requests()),
        setting,
        model=played.model,
        block_tokens=border,
        since=0,
        resume=played.resume,
    )
    last = guess.found[12:].sum() / sum(tokens + seed for seed in range(6))
    host = {"tiers": [{"kind": "host", "bytes": 2**30}]}
    with servers.serve(path, host, **more) as server:
        real = asked_thrice(server, tokens)
    assert len(guess.found) == 18
    assert alone < 0.1
    assert real > 0.7
    assert abs(real - last) < 0.02


def test_a_listener_reads_vllms_publisher(tmp_path):
    events, replay = (f"ipc://{tmp_path}/{name}" for name in ("events", "replay"))
    stored = BlockStored(
        block_hashes=[1, b"\x02" * 32],
        parent_block_hash=None,
        token_ids=list(range(2 * SIZE)),
        block_size=SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[("salt",), None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="chat",
    )
    removed = BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0)
    publisher = ZmqEventPublisher(0, endpoint=events, replay_endpoint=replay, topic="kv")
    try:
        for at, event in enumerate((stored, removed, AllBlocksCleared())):
            publisher.publish(KVEventBatch(ts=float(at), events=[event]))
        publisher._event_queue.join()
        with listening(events, replay, patience_s=60) as heard:
            batches = list(islice(heard.history(), 9))
    finally:
        publisher.shutdown()
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert [batch.at for batch in batches] == [0, 1, 2]
    assert batches[0].stored[0].hashes == [1, b"\x02" * 32]
    assert batches[0].stored[0].session == "chat"
    assert batches[1].removed == [1]
    assert batches[2].cleared
    assert {batch.rank for batch in batches} == {0}
