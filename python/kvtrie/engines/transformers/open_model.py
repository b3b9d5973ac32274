"""OpenModel: a model of transformers with the tiers of its KV.

Invariant: tiers are closed once, and what they hold is stored before.
Cost: of `open`, that of pools, of an executor and of a digest of the weights.
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
    """A model and the tiers of its KV, as `open` makes it.

    Leaving `with` stores the blocks that are not on disk yet, closes the tiers and gives their
    memory back, also after an exception.

    Attributes:
        model: the model.
        executor: carries out the moves of the tiers.
        scope: whose KV caches share.
        publisher: publishes the blocks to routers; None publishes nothing.
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
        """Return a cache for `generate` over prompts; its arguments are those of `KvtrieCache`.

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
        """Store blocks that are not on disk yet, close the tiers, give their memory back.

        Twice does nothing.
        """
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
    """End the threads of an executor, give its memory and folders back. Twice does nothing."""
    try:
        executor.close()
    finally:
        close_pools(executor.pools)
