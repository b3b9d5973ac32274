"""InMemory: chunks with K and V from the caller, used without a store as a fetch without a lease.

Invariant: `read` copies only a chunk's own K and V. Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvtrie.fuse.context import Chunk

__all__ = ["InMemory", "LoosePart"]


class LoosePart:
    """A chunk with its K and V.

    Attributes:
        tokens: int64 `(n,)`.
        at: position of the first token, to which its K is rotated.
        state: "given".
    """

    state = "given"

    def __init__(self, chunk: Chunk) -> None:
        self.tokens: NDArray[np.int64] = chunk.tokens
        self.at = chunk.at
        self.kv = chunk.kv


class InMemory:
    """A fetch, as `CacheStore.fetch_many` returns it, of chunks whose K and V are in memory.

    Raises:
        ConfigError: a chunk without K and V.
    """

    prefix = None

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        bare = [at for at, chunk in enumerate(chunks) if chunk.kv is None]
        if bare:
            raise ConfigError(
                f"chunks {bare} come without K and V, and there is no store to find them in: give "
                "Fusor a CacheStore"
            )
        self.parts = tuple(LoosePart(chunk) for chunk in chunks)
        self.order = tuple(range(len(chunks)))

    def absent(self) -> Iterator[LoosePart]:
        """Return an empty iterator: all chunks have K and V."""
        return iter(())

    def wait(self, layer: int) -> list[LoosePart]:  # noqa: ARG002 - all layers are there
        """Return an empty list: no load can fail."""
        return []

    def read(self, part: LoosePart, layer: int, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy K and V `(n, heads, dim)` of a layer to `out`."""
        assert part.kv is not None  # noqa: S101 - checked by `InMemory`
        for target, source in zip(out, part.kv[layer], strict=True):
            target.copy_(source)

    def close(self) -> None:
        """Do nothing: there is no lease."""
