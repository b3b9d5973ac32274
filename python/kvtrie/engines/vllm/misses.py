"""Misses: the computed prompt tokens of admitted requests, by cause.

Invariant: each token is counted once. Cost: as `MissCounter`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.engines.server.miss_report import UNASKED, client_report
from kvtrie.engines.server.why import Admitted, MissCounter

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtrie.engines.vllm.cache import ServedCache
    from kvtrie.engines.vllm.settings import Settings
    from kvtrie.engines.vllm.waiting import WaitingRequest

__all__ = ["Misses"]


class Misses:
    """Counts computed tokens, and explains them to clients.

    Attributes:
        why: the counts by cause, or None if they are not counted.
    """

    def __init__(self, cache: ServedCache, settings: Settings) -> None:
        self._cache = cache
        self._keep = max(1, settings.native_last)  # trailing prompt tokens, always computed
        self._clients = settings.why_clients
        self.why: MissCounter | None = None
        if settings.why:
            self.why = MissCounter(
                cache.manager,
                min_tokens=settings.why_min_tokens,
                per_second=settings.why_per_second,
                place=cache.native.shrink if cache.native.tokens else None,
            )

    def admitted(self, request: Request, waiting: WaitingRequest, start: int, now: int) -> None:
        """Count the prompt tokens computed by a request from a position on, once each."""
        cache, scope, sequence = self._cache, waiting.scope, waiting.sequence
        unread = cache.resetting or not cache.identity.known or request.skip_reading_prefix_cache
        unread = unread or scope is None
        if waiting.asked and waiting.why is None and self._clients:
            findable = 0 if unread else (waiting.prompt - self._keep) // cache.size * cache.size
            found = min(sequence.tokens(start), waiting.prompt)
            waiting.why = client_report(waiting.prompt, found, findable)
        if self.why is None:
            return
        prompt = sequence.at(waiting.prompt)
        start, waiting.counted = max(start, waiting.counted), max(prompt, waiting.counted)
        if unread or scope is None:
            self.why.uncached(max(0, waiting.prompt - sequence.tokens(start)))
            return
        compared = waiting.asked and self._clients
        about = request.request_id, sequence.read()[:prompt], scope, waiting.session, compared
        self.why.admitted(Admitted(*about), start, now)

    def answer(self, waiting: WaitingRequest | None) -> dict[str, Any] | None:
        """Return the miss report of a finished request, if its client asked for it."""
        if waiting is None or not waiting.asked:
            return None
        return waiting.why if self._clients else dict(UNASKED)

    def close(self) -> None:
        """End the thread for comparing prompts."""
        if self.why is not None:
            self.why.close()
