"""OpenModel: a model of transformers with the tiers of its KV.

Invariant: tiers are closed once, and what they hold is stored before.
Cost: of `open`, that of pools, of an executor and of a digest of the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.engines.transformers.cache import KvtrieCache
from kvtrie.engines.transformers.opening import LOOKUP_S, close_executor, open_executor
from kvtrie.errors import ClosedError
from kvtrie.settings.tier import DEFAULT_POLICY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch
    from transformers import PreTrainedModel

    from kvtrie import ResumePoints, Scope
    from kvtrie.transfer import Executor

__all__ = ["OpenModel", "open"]


class OpenModel:
    """A model and the tiers of its KV, as `open` makes it.

    Leaving `with` stores the blocks that are not on disk yet, closes the tiers and gives their
    memory back, also after an exception.

    Attributes:
        model: the model.
        executor: carries out the moves of the tiers.
        scope: whose KV caches share.
    """

    def __init__(self, model: PreTrainedModel, executor: Executor, scope: Scope | None) -> None:
        self.model, self.executor, self.scope = model, executor, scope
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
            close_executor(self.executor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open(  # noqa: A001 - read as `transformers.open`
    model: PreTrainedModel,
    *,
    host: int | str | None = "8GB",
    disk: str | None = None,
    gpu: int | str | None = None,
    block_tokens: int = 16,
    policy: str = DEFAULT_POLICY,
    scope: Scope | None = None,
    keep: str | None = None,
    remote: str | None = None,
    resume: ResumePoints | None = None,
) -> OpenModel:
    """Open tiers for the KV of a model, with the blocks that an earlier process left.

    The shape and the fingerprint come from the model. One line on standard error has the sizes.

    Args:
        model: the model, on the device where it will run.
        host: size of host memory; None for none.
        disk: folder and size of the disk, as `kv:200GB`; None for none.
        gpu: size of the first tier, in the memory of the model's device; None is a quarter of what
            is free there.
        block_tokens: tokens per block.
        policy: the policy that ranks blocks for eviction.
        scope: whose KV may be shared, by all caches.
        keep: path of the file in a memory file system, such as `/dev/shm/kv`, that is the host
            memory, so that the next process finds the blocks, after a kill too: each is copied
            there as soon as it is computed. None keeps nothing. A second process that finds the
            file in use starts with a pool of its own.
        remote: URL of a store that several processes share, as `folder:/mnt/kv`; None for none.
            Every block is stored there as soon as it is computed.
        resume: keep groups of layers apart, so that layers with a window keep no more than that;
            None does so where layers keep states or KV of different shapes, and otherwise keeps
            all tokens of all layers.

    Raises:
        ConfigError: a size, path, URL or policy that cannot be, a model whose KV no tier holds, a
            folder that another process writes to, a file of another model, or groups of layers
            with a remote tier.
        TransferError: the folder cannot be read or made.
    """
    executor = open_executor(
        model,
        host=host,
        disk=disk,
        gpu=gpu,
        block_tokens=block_tokens,
        policy=policy,
        keep=keep,
        remote=remote,
        resume=resume,
    )
    return OpenModel(model, executor, scope)
