"""OpenModel: a transformers model with the tiers of its KV.

Invariant: tiers are closed once, after their blocks are stored on disk.
Cost: `open` creates the pools and an executor, and digests the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.transformers.admission import LOOKUP_S
from kvtrie.engines.transformers.cache import KvtrieCache
from kvtrie.errors import ClosedError
from kvtrie.tiers import close_pools

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch
    from transformers import PreTrainedModel

    from kvtrie import Scope
    from kvtrie.cluster import Publisher
    from kvtrie.transfer import Executor

__all__ = ["OpenModel", "close_executor"]


class OpenModel:
    """A model with the tiers of its KV, created by `open`.

    Leaving `with` stores blocks not yet on disk, closes the tiers and frees their memory, also
    after an exception.

    Attributes:
        model: the model.
        executor: carries out the moves of the tiers.
        scope: the scope of all caches.
        publisher: publishes the blocks to routers. None publishes nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        executor: Executor,
        scope: Scope | None,
        publisher: Publisher | None = None,
    ) -> None:
        self.model, self.executor, self.scope = model, executor, scope
        self.publisher = publisher
        self._open = True

    def cache(
        self,
        ids: torch.Tensor,
        *,
        reserve: int = 0,
        attention_mask: torch.Tensor | None = None,
        sessions: Sequence[str] | None = None,
        lookup_s: float = LOOKUP_S,
    ) -> KvtrieCache:
        """Return a cache for `generate` over prompts. Arguments are as for `KvtrieCache`.

        Raises:
            ClosedError: the tiers are closed.
        """
        if not self._open:
            raise ClosedError("the tiers of the model are closed: open them again")
        return KvtrieCache(
            self.model,
            self.executor,
            ids,
            attention_mask=attention_mask,
            reserve=reserve,
            scope=self.scope,
            sessions=sessions,
            lookup_s=lookup_s,
            events=self.publisher,
        )

    def close(self) -> None:
        """Store blocks not yet on disk, close the tiers and free their memory. Idempotent."""
        if not self._open:
            return
        self._open = False
        try:
            self.executor.save()
        finally:
            if self.publisher is not None:
                self.publisher.close()
            close_executor(self.executor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close_executor(executor: Executor) -> None:
    """Stop the threads of an executor, free its memory and unlock its folders. Idempotent."""
    try:
        executor.close()
    finally:
        close_pools(executor.pools)
