"""PoolPages: stored pages of a pool of SGLang's host memory.

SGLang has a pool for KV and, for models with windows, states or an indexer, a pool for each of
these. The hash of a page identifies all tokens up to its end, so a state has the key of the page
before it. Invariant: each pool has separate pages, never found by the name of a different pool.
Cost: reads and writes, and a copy of each page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    from kvtrie.engines.sglang.pages import Pages

__all__ = ["POOLS", "PoolPages", "memory_of"]

POOLS = ("kv", "swa", "auxiliary_swa", "mamba", "indexer")
"""Names of stored pools. Draft KV is not stored: page names do not cover draft weights."""


class PoolPages:
    """Stored pages of a pool.

    Args:
        pool: SGLang's host memory.
        pages: the disk or the shared store.

    Attributes:
        pages: the disk or the shared store.
    """

    def __init__(self, pool: HostKVCache, pages: Pages) -> None:
        self._pool, self.pages = pool, pages

    def read(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Read pages into the pool. Return for each page whether it was found intact."""
        pages = [self._pool.get_dummy_flat_data_page() for _ in keys]
        rows = [(key.encode(), memory_of(page)) for key, page in zip(keys, pages, strict=True)]
        starts = self._starts(host_indices, len(keys))
        found = self.pages.read_many(rows)
        for start, page, whole in zip(starts, pages, found, strict=True):
            if whole:
                self._pool.set_from_flat_data_page(start, page)
        return found

    def write(
        self, keys: Sequence[str], host_indices: torch.Tensor, before: str | None
    ) -> list[bool]:
        """Store pages of the pool. Return for each page whether it is stored.

        Args:
            keys: SGLang's hashes, in the order of their sequence.
            host_indices: the rows of the pool, `(keys * page_size,)`.
            before: the hash of the page before the first page, if the pool's order matters.
        """
        starts = self._starts(host_indices, len(keys))
        values = (self._pool.get_data_page(start, flat=True) for start in starts)
        return self.write_values(keys, list(values), before)

    def write_values(
        self, keys: Sequence[str], values: Sequence[torch.Tensor], before: str | None
    ) -> list[bool]:
        """Store pages already copied by SGLang. Return for each page whether it is stored."""
        rows = [
            (key.encode(), memory_of(value.contiguous()))
            for key, value in zip(keys, values, strict=True)
        ]
        return self.pages.write_many(rows, after=None if before is None else before.encode())

    def borders(self, keys: Sequence[bytes], last: int | None) -> set[int]:
        """Return the prefix lengths, in pages, with all needed pages of this pool.

        Args:
            keys: the hashes of the prefix.
            last: the number of pages needed before a border, None for all pages.
        """
        if last is None:
            return set(range(1, self.pages.leading(keys) + 1))
        borders, run = set[int](), 0
        for border, present in enumerate(self.pages.present(keys), 1):
            run = run + 1 if present else 0
            if run >= min(last, border):
                borders.add(border)
        return borders

    def _starts(self, host_indices: torch.Tensor, pages: int) -> list[int]:
        size = int(self._pool.page_size)
        if len(host_indices) != pages * size:
            raise ValueError(f"{len(host_indices)} rows given for {pages} pages of {size}")
        return host_indices[::size].tolist()  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType] - torch's


def memory_of(page: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous page, sharing its memory."""
    return page.view(-1).view(torch.uint8).numpy()
