"""PromptLengths: the number of tokens of a prompt up to a client's marker.

Only the server knows its template and tokenizer. So it counts the tokens of the shorter body itself
in a request within the process, with the client's headers.
Invariant: a cached length is reused only for the same salt and `Authorization`.
Cost: a body is rendered once. At most 4096 lengths of 150 bytes are cached.
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
_COUNTS = {  # paths for counting tokens. For responses, vLLM needs `--enable-scale-out`
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
    """Lengths of prompt prefixes.

    Args:
        app: the server.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: OrderedDict[bytes, int] = OrderedDict()

    async def of(
        self, scope: Scope, path: str, body: Mapping[str, Any], place: Place, salt: object
    ) -> int | None:
        """Return the tokens of a prompt up to `place`, or None if it cannot be rendered.

        Args:
            scope: the request's scope.
            path: its path, below the application's root.
            body: its body.
            place: the end.
            salt: its `cache_salt`.
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
    """Return the number of tokens in an answer."""
    counts = (answer[name] for name in ("count", "input_tokens") if name in answer)
    return int(next(counts, None) or len(answer["token_ids"]))
