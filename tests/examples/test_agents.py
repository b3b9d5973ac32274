"""The agents of the example against a server that plays vLLM's: tokens found with their hints.

The server renders a token per byte and has a manager of two tiers instead of a model; middleware
and control socket are real. `tests/served/vllm_agents.py` asks vLLM itself.
"""

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.engines.server.commands import CommandQueue
from kvtrie.engines.server.control import Controlled, ControlSocket
from kvtrie.engines.server.request_hints import read_hints
from kvtrie.engines.vllm.hints import range_hints
from kvtrie.engines.vllm.middleware import AgentHints

uvicorn = pytest.importorskip("uvicorn", reason="the server needs uvicorn")

ROOT = Path(__file__).parents[2]
SECTIONS = ("cache", "disk", "hints")


def rendered(body):
    """The tokens of a prompt: system, tools, then each message, without markers."""
    parts = [body.get("system", ""), body.get("tools", ""), *body.get("messages", [])]
    text = "".join(json.dumps(part) for part in parts)
    for time_ in ("1h", "5m"):
        text = text.replace(f', "cache_control": {{"type": "ephemeral", "ttl": "{time_}"}}', "")
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


class Server:
    """vLLM's paths that the example uses, over a manager."""

    def __init__(self, folder):
        shape = ModelShape(layers=1, kv_heads=1, head_dim=4)
        tiers = [Tier("gpu", blocks=64), Tier("host", blocks=64)]
        self.manager = BlockManager(shape, tiers, block_tokens=32)
        self.commands, self.calls = CommandQueue(), []
        engine = Controlled(self.manager, None, dict, {}, self.commands)
        self.control = ControlSocket(str(folder / "s"), engine)
        transfer = SimpleNamespace(kv_connector_extra_config={"control": self.control.path})
        parallel = SimpleNamespace(data_parallel_size=1)
        config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
        self.state = SimpleNamespace(vllm_config=config)

    async def __call__(self, scope, receive, send):
        message = await receive()
        content = message["body"]
        while message["more_body"]:
            content += (message := await receive())["body"]
        body = json.loads(content or b"{}")
        self.calls.append(scope["path"])
        if scope["path"] == "/v1/models":
            answer = {"data": [{"id": "m"}]}
        elif scope["path"] == "/v1/messages/count_tokens":
            answer = {"input_tokens": len(rendered(body))}
        else:
            answer = self.serve(body)
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        text = json.dumps(answer, separators=(",", ":"))
        await send({"type": "http.response.body", "body": text.encode()})

    def move(self, now):
        """Carry out all moves."""
        while len(moves := self.manager.moves().id):
            self.manager.complete(moves, now=now)

    def serve(self, body):
        """Find and store a prompt; call a tool that follows from its tokens."""
        tokens, now, manager = rendered(body), time.monotonic_ns(), self.manager
        self.commands.apply(manager, "", now)
        hints = read_hints(body.get("kv_transfer_params"))
        assert hints.ignored == ()
        manager.hint(range_hints(hints.ranges, tokens, None, hints.session), now=now)
        with manager.acquire(tokens, now=now, session=hints.session) as lease:
            self.move(now)
            found = lease.matched
            lease.commit(tokens[found:], now=now)
        self.move(now)
        section = SECTIONS[crc32(tokens.tobytes()) % 3]
        call = {"type": "tool_use", "id": "t", "name": "read", "input": {"section": section}}
        usage = {"input_tokens": len(tokens) - found, "cache_read_input_tokens": found}
        return {"content": [call], "stop_reason": "tool_use", "usage": usage}


@contextmanager
def listening(app):
    """The address of an application."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    sockets = [config.bind_socket()]
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
    thread.start()
    try:
        yield "http://{}:{}".format(*sockets[0].getsockname())
    finally:
        server.should_exit = True
        thread.join()


def play(folder, *arguments, hinted):
    """The report of the example, and its server."""
    server = Server(folder)
    inner = AgentHints(server) if hinted else server

    async def app(scope, receive, send):
        await inner({**scope, "app": server}, receive, send)

    with listening(app) as url:
        command = [sys.executable, "-m", "examples.agents", url, "--json", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    server.control.close()
    server.commands.apply(server.manager, "", time.monotonic_ns())
    server.manager.audit()
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), server


def test_agents_find_more_tokens_with_their_hints(tmp_path):
    plain, without = play(tmp_path, hinted=False)
    marked, server = play(tmp_path, hinted=True)
    turns = len(marked["turns"])
    assert [row[::2] for row in marked["turns"]] == [row[::2] for row in plain["turns"]]
    assert marked["found"] >= 1.5 * plain["found"]
    assert marked["found"] >= 0.5 * marked["prompt"]
    assert without.commands.applied == 0
    # A pause is a `retain` and a `progress`. The system prompt is counted once.
    assert (server.commands.applied, server.commands.failed) == (2 * turns, 0)
    assert server.calls.count("/v1/messages/count_tokens") == 1
    assert server.manager.stats().tiers["host"].retained > 0


def test_agents_without_hints_are_served_the_same(tmp_path):
    plain, _ = play(tmp_path, "--turns", "3", hinted=False)
    again, server = play(tmp_path, "--turns", "3", "--plain", hinted=True)
    assert again == plain
    assert server.commands.applied == 0
