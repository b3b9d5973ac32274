"""Requests of clients' libraries with their hints, as vLLM's protocols read them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from kvtrie.engines.server.request_hints import read_hints
from kvtrie.engines.vllm.middleware import AgentHints

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests" / "engines" / "client_requests.json").read_text())
PROTOCOLS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/responses": ResponsesRequest,
}

COUNTS = {
    "/tokenize": TokenizeChatRequest,
    "/v1/messages/count_tokens": AnthropicCountTokensRequest,
}


class Application:
    """A server that reads by vLLM's protocols; each prompt that it counts has 3 tokens."""

    def __init__(self, path):
        self.path, self.rendered, self.read = path, 0, None

    async def __call__(self, scope, receive, send):
        content = (await receive())["body"]
        if scope["path"] == self.path:
            self.read = PROTOCOLS[self.path].model_validate_json(content)
            return
        COUNTS[scope["path"]].model_validate_json(content)
        self.rendered += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"count": 3}'})


def extra_of(request):
    """The parameters that vLLM passes to the engine."""
    if isinstance(request, AnthropicMessagesRequest):
        request = AnthropicServingMessages.to_chat_completion_request(request)
    return request.to_sampling_params(9, {}).extra_args["kv_transfer_params"]


@pytest.mark.parametrize("at", range(len(RECORDED)))
def test_hints_of_clients_reach_the_engine(at):
    one = RECORDED[at]
    app = Application(one["path"])
    sent = [{"type": "http.request", "body": one["body"].encode(), "more_body": False}]
    headers = [(name.encode(), value.encode()) for name, value in one["headers"].items()]
    scope = {"type": "http", "method": "POST", "path": one["path"], "headers": headers}

    async def receive():
        return sent.pop()

    async def send(message):
        pytest.fail(str(message))

    asyncio.run(AgentHints(app)(scope, receive, send))
    hints = read_hints(extra_of(app.read))
    assert hints.ignored == ()
    assert hints.session or hints.ranges
    assert app.rendered == sum(each.last == 3 for each in hints.ranges)
