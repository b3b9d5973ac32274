"""PromptLengths: the tokens of a prompt that ends where a client marked it.

Only the server knows its template and tokenizer, so it counts the tokens of the shorter body
itself, by a request inside of the process that has the client's headers.
Invariant: a length that is found sooner, because it is known, was asked for with the same salt and
`Authorization`. Cost: a body is rendered once; at most 4096 lengths of 150 bytes are kept.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvtrie.engines.server.client_fields import cut
from kvtrie.engines.vllm.asgi import call, headers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtrie.engines.server.client_fields import Place
    from kvtrie.engines.vllm.asgi import App, Scope

__all__ = ["PromptLengths"]

_MOST = 4096
_SUCCESS = 200
_COUNTS = {  # the path that counts tokens; vLLM has that of responses with `--enable-scale-out`
    "/v1/chat/completions": "/tokenize",
    "/v1/messages": "/v1/messages/count_tokens",
    "/v1/responses": "/v1/responses/render",
}
_RENDERED = (
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "input",
    "instructions",
    "max_tokens",
    "messages",
    "model",
    "output_config",
    "reasoning",
    "reasoning_effort",
    "system",
    "thinking",
    "tool_choice",
    "tools",
)


class PromptLengths:
    """Lengths of the beginnings of prompts.

    Args:
        app: the server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: OrderedDict[bytes, int] = OrderedDict()

    async def of(
        self, scope: Scope, path: str, body: Mapping[str, Any], place: Place, salt: object
    ) -> int | None:
        """Return the tokens of a prompt that ends at a place; None if it cannot be rendered.

        Args:
            scope: of the request.
            path: its path, below the application's root.
            body: its body.
            place: the end.
            salt: the `cache_salt` that it is served with.
        """
        if path not in _COUNTS:
            return None
        shown = {name: body[name] for name in _RENDERED if name in body} | cut(body, place)
        if path == "/v1/chat/completions":
            shown["add_generation_prompt"] = False
        content = json.dumps(shown).encode()
        about = json.dumps([path, salt, headers_of(scope).get("authorization")])
        key = blake2b(about.encode() + content, digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        status, answer = await call(self._app, scope, _COUNTS[path], content)
        if status != _SUCCESS:
            return None
        self._known[key] = found = _count(json.loads(answer))
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return found


def _count(answer: Mapping[str, Any]) -> int:
    """The tokens that an answer counts."""
    counts = (answer[name] for name in ("count", "input_tokens") if name in answer)
    return int(next(counts, None) or len(answer["token_ids"]))
