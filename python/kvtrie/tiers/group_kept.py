"""GroupKept: the memory of a host tier with `keep`, of a model whose groups are kept apart.

The pages of all groups are one file of a memory file system, `PATH-pages`. Each group has a table
of its slots, `PATH-groupN`: a kept file whose pool holds digests of the slots' layers instead of
their bytes. A group that takes a page over empties the entries that other groups have there before
its first byte is copied.

```text
PATH-pages    | page 0: group 0      | page 1: group 1 | page 2: group 0  ...
PATH-group0   [ entries 0 to 4      ]  5 to 9: empty    [ entries 10 to 14 ]
PATH-group1     0: empty             [ entry 1         ]  2: empty
```

Invariant: that of `KeptPool` in each group, so a block is found again only if it was sealed, and
used only if its bytes give its digests. A resume point whose parts are not all found is no point
again. Cost: that of `KeptPool`, with a BLAKE2b per layer; one call per other group when a page goes
from group to group.
"""

from __future__ import annotations

import json
import logging
import mmap
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtrie import Index
from kvtrie.model.group_pages import LAYER_DIGEST, GroupPages, layer_digests
from kvtrie.model.shape import require_fingerprint
from kvtrie.tiers.block_format import BlockFormat
from kvtrie.tiers.group_pools import GroupPool, GroupPools
from kvtrie.tiers.kept import KeptPool, check_memory, open_kept_file
from kvtrie.tiers.meaning import meaning
from kvtrie.tiers.pages_file import PagesFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

    from kvtrie._kvtrie import KeptFile
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["GroupKept", "GroupKeptPool", "group_kept"]

_LOG = logging.getLogger(__name__)
_NO_KEY = bytes(32)
_NONE = -1


class GroupKeptPool(GroupPool, KeptPool):
    """The slots of one group in memory that the next process finds.

    Args:
        model: the shape whose KV is kept.
        group: which of its groups.
        block_tokens: tokens of a block.
        tier: whose memory it is.
        memory: uint8, the pages of all groups.
        file: the table of the group's slots, locked by this process.
        take: frees the pages of slots that other groups had.
        clock: the wall clock in nanoseconds.
    """

    def __init__(
        self,
        model: ModelShape,
        group: int,
        block_tokens: int,
        tier: Tier,
        memory: torch.Tensor,
        *,
        file: KeptFile,
        take: Callable[[int, NDArray[np.integer]], None],
        clock: Callable[[], int],
    ) -> None:
        GroupPool.__init__(self, model, group, block_tokens, tier, memory)
        self._group, self._take = group, take
        start, length = file.pool
        mapped = mmap.mmap(file.descriptors[0], length - start, offset=start)
        size = file.slots * self.layers * LAYER_DIGEST
        self._sums = np.frombuffer(mapped, np.uint8)[:size].reshape(file.slots, self.layers, -1)
        self._keep_in(file, clock)

    def begin(
        self, slots: NDArray[np.integer], keys: Sequence[bytes], layers: tuple[int, int]
    ) -> dict[int, str]:
        """As of `KeptPool`; entries of other groups in the pages of these slots are empty then."""
        if not self.closed:
            self._take(self._group, slots)
        return super().begin(slots, keys, layers)

    def close(self) -> None:
        """As of `KeptPool`."""
        super().close()
        self._sums = self._sums[:0].copy()

    def empty(self, first: int, upto: int) -> None:
        """Empty the entries of some slots."""
        slots = [*range(first, upto)]
        keys = [_NO_KEY] * len(slots)
        self.file.begin(slots, keys, (0, self.layers))
        self.file.finish(slots, keys, ok=False)

    def _bytes(self, place: int, layers: tuple[int, int]) -> NDArray[np.uint8]:
        """The digests of some layers of a slot, which the table has then."""
        block, each = self.block(place).numpy(), self.unit_bytes
        lo, hi = layers
        digests = layer_digests(block[lo * each : hi * each].data, hi - lo)
        self._sums[place, lo:hi] = np.frombuffer(digests, np.uint8).reshape(hi - lo, -1)
        return self._sums[place, layers[0] : layers[1]]


class GroupKept(GroupPools):
    """The memory of a host tier that all groups share and the next process finds.

    Args:
        model: the shape whose KV is kept.
        tier: its budget.
        block_tokens: tokens of a block.
        memory: all pages.
        files: the table of each group.
        clock: the wall clock in nanoseconds.

    Attributes:
        kept: the pool of each group.
    """

    def __init__(
        self,
        model: ModelShape,
        tier: Tier,
        block_tokens: int,
        memory: PagesFile,
        *,
        files: Sequence[KeptFile],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(model, tier, block_tokens, memory=memory.memory)
        self._file = memory
        pages = GroupPages.of(model, tier, block_tokens)
        self._per_page = pages.per_page
        self._owner = np.full(pages.count, _NONE, dtype=np.int16)
        self._lock = threading.Lock()
        self.kept = tuple(
            GroupKeptPool(
                model,
                at,
                block_tokens,
                tier,
                memory.memory,
                file=file,
                take=self._take,
                clock=clock,
            )
            for at, file in enumerate(files)
        )
        self.groups = self.kept

    def recall(self) -> Index:
        """Return the index of the blocks of earlier processes, the first group's first."""
        index = Index()
        for group, pool in enumerate(self.kept):
            found = pool.recall()
            index += Index([(*row[:4], group) for row in found]) if group else found
        return index

    def keep(self, index: Index) -> None:
        """Seal all that has been copied, and note the ages and uses of the blocks of `index`."""
        for pool, rows in self._by_group(index):
            pool.keep(rows)

    def note_uses(self, index: Index, wall: int | None = None) -> None:
        """Note ages and uses of the blocks of `index`; see `KeptPool.note_uses`."""
        for pool, rows in self._by_group(index):
            pool.note_uses(rows, wall)

    def close(self) -> None:
        """Seal what has been copied, give the locks and the memory back. Twice does nothing."""
        with ExitStack() as closing:
            closing.callback(super().close)
            closing.callback(self._file.close)  # first: the tables are locked yet

    def _by_group(self, index: Index) -> list[tuple[GroupKeptPool, Index]]:
        rows = [*index]
        groups = index.group.tolist()
        return [
            (pool, Index([row[:4] for row, at in zip(rows, groups, strict=True) if at == group]))
            for group, pool in enumerate(self.kept)
        ]

    def _take(self, group: int, slots: NDArray[np.integer]) -> None:
        """Empty what groups other than one have in the pages of some slots of that group."""
        with self._lock:
            self._file.settle()
            for page in {int(slot) // self._per_page[group] for slot in slots}:
                # A slot beyond the pages is refused by the table.
                if page >= len(self._owner) or self._owner[page] == group:
                    continue
                for other, pool in enumerate(self.kept):
                    if other != group:
                        each = self._per_page[other]
                        pool.empty(page * each, (page + 1) * each)
                self._owner[page] = group


def group_kept(
    model: ModelShape,
    tier: Tier,
    block_tokens: int,
    *,
    clock: Callable[[], int] = time.time_ns,
) -> GroupKept | None:
    """Open the files of a tier with `keep`, or make them.

    Args:
        model: the shape whose KV is kept; its `fingerprint` may not be empty.
        tier: its path, its budget and its layout.
        block_tokens: tokens of a block.
        clock: the wall clock in nanoseconds.

    Returns:
        The memory; None if another process has the files, of which the log warns.

    Raises:
        ConfigError: a model without a fingerprint, a path outside a memory file system, files with
            something else unless `keep_replace`, less memory than the tier takes.
        TransferError: the file system has no room.
    """
    assert tier.keep is not None  # noqa: S101 - its callers look
    base = Path(tier.keep).absolute()
    require_fingerprint(model, f"the kept files {base}")
    pages = GroupPages.of(model, tier, block_tokens)
    size = pages.count * pages.page
    check_memory(_part(base, "pages"), size)
    files: list[KeptFile] = []
    with ExitStack() as opened:
        for group, per_page in enumerate(pages.per_page):
            fmt = BlockFormat.of_group(model, group, block_tokens, tier.layout)
            file = open_kept_file(
                _part(base, f"group{group}"),
                _meaning(meaning(model, fmt.layout, block_tokens, 0, group), pages, group),
                (fmt.layers, LAYER_DIGEST, block_tokens, pages.count * per_page),
                replace=tier.keep_replace,
            )
            if file is None:
                return None
            opened.callback(file.close)
            files.append(file)
            if file.cold is not None:
                _LOG.warning("%s: starts without blocks: %s", file.path, file.cold)
        touch = not any(file.found for file in files)
        memory = PagesFile(_part(base, "pages"), size, touch=touch)
        opened.callback(memory.close)
        kept = GroupKept(model, tier, block_tokens, memory, files=files, clock=clock)
        opened.pop_all()
    return kept


def _meaning(about: str, pages: GroupPages, group: int) -> str:
    """The meaning of a group's blocks with the sizes by which a tool finds them in the pages."""
    sizes = {"page_bytes": pages.page, "slot_bytes": pages.slots[group]}
    return json.dumps({**json.loads(about), **sizes}, sort_keys=True)


def _part(base: Path, name: str) -> Path:
    return base.with_name(f"{base.name}-{name}")
