"""Agent: a loop of tool calls over the Messages API, as Anthropic's clients send it.

A turn sends the whole conversation with a marker after the system prompt and one after the last
message, runs the tool that the model calls, and adds the result.
Invariant: what is sent never changes in front, so a server that keeps its KV computes only the end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

__all__ = ["Agent", "Turn", "post"]

_TIMEOUT_S = 300
_MOST_TOKENS = 160
_SECTIONS = {
    "cache": "A block is evicted when a request needs its room and no lease holds it.",
    "disk": "A block on disk is read into host memory and verified before a request reads it.",
    "hints": "A hint changes the order of eviction. It pins nothing and refuses nothing.",
}
_TOOL = {
    "name": "read",
    "description": "Read a section of the manual.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"section": {"enum": [*_SECTIONS]}},
        "required": ["section"],
        "additionalProperties": False,
    },
}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a server to a JSON body."""
    head = {"Content-Type": "application/json"}
    request = Request(url, json.dumps(body).encode(), head)  # noqa: S310 - the caller's server
    with urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
        return json.loads(answer.read())


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent.

    Attributes:
        prompt: tokens of its prompt.
        found: those that the server did not compute.
        answer: the blocks of the answer.
    """

    prompt: int
    found: int
    answer: list[dict[str, Any]]


@dataclass(slots=True)
class Agent:
    """A conversation of one task.

    Attributes:
        url: the server's.
        model: its name there.
        name: of the session.
        plain: without markers and name, as a client that knows no conventions.
        messages: the conversation so far.
    """

    url: str
    model: str
    name: str
    plain: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def turn(self) -> Turn:
        """Send the conversation, and run the tools that the answer calls."""
        if not self.messages:
            task = {"type": "text", "text": f"Task {self.name}: what keeps a block?"}
            self.messages.append({"role": "user", "content": [task]})
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": _MOST_TOKENS,
            "temperature": 0,
            "system": [{"type": "text", "text": "You answer from the manual. " * 6}],
            "tools": [_TOOL],
            "tool_choice": {"type": "tool", "name": _TOOL["name"]},  # whatever the model is
            "messages": self.messages,
        }
        if not self.plain:
            body["metadata"] = {"user_id": f"user_1_account_1_session_{self.name}"}
            _mark(body["system"][-1], "1h")
            body["messages"] = [*self.messages[:-1], _marked(self.messages[-1])]
        said = post(f"{self.url}/v1/messages", body)
        usage = said["usage"]
        found = usage.get("cache_read_input_tokens") or 0
        self.messages.append({"role": "assistant", "content": said["content"]})
        results = [*map(_result, _calls(said))] or [{"type": "text", "text": "Go on."}]
        self.messages.append({"role": "user", "content": results})
        prompt = usage["input_tokens"] + found + (usage.get("cache_creation_input_tokens") or 0)
        return Turn(prompt, found, said["content"])


def _calls(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for block in said["content"] if block["type"] == "tool_use"]


def _result(call: dict[str, Any]) -> dict[str, Any]:
    text = _SECTIONS[call["input"]["section"]]
    return {"type": "tool_result", "tool_use_id": call["id"], "content": text}


def _mark(block: dict[str, Any], time: str) -> None:
    block["cache_control"] = {"type": "ephemeral", "ttl": time}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """A copy of a message with a marker after it."""
    blocks = [dict(block) for block in message["content"]]
    _mark(blocks[-1], "5m")
    return {**message, "content": blocks}
