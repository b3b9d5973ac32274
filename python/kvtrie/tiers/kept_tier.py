"""Opens the files and pools of a host tier with `keep`.

With separate groups of layers, the pages of all groups are in the file `PATH-pages`, and each group
has a table of its slots, `PATH-groupN`: a kept file with digests of the slots' layers instead of
their bytes. A group taking over a page empties the other groups' entries for it before the first
byte is copied:

```text
PATH-pages    | page 0: group 0      | page 1: group 1 | page 2: group 0  ...
PATH-group0   [ entries 0 to 4      ]  5 to 9: empty    [ entries 10 to 14 ]
PATH-group1     0: empty             [ entry 1         ]  2: empty
```

A resume point with a missing part is lost.
Invariant: after an error, or if another process has a file, no file stays open and no file is
changed.
Cost: mapping the memory.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.model.group_pages import LAYER_DIGEST
from kvtrie.model.shape import require_fingerprint
from kvtrie.tiers.group_slots import GroupSlots
from kvtrie.tiers.kept import KeptPool
from kvtrie.tiers.kept_file import PATIENCE_S, check_memory, open_kept_file, pool_of
from kvtrie.tiers.meaning import meaning
from kvtrie.tiers.page_owners import PageOwners
from kvtrie.tiers.pages_file import PagesFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtrie._kvtrie import KeptFile
    from kvtrie.model.layout import Layout
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier

__all__ = ["kept_pool"]

_LOG = logging.getLogger("kvtrie.tiers.kept")


def kept_pool(
    model: ModelShape,
    tier: Tier,
    block_tokens: int,
    *,
    layout: Layout | None = None,
    rank: int = 0,
    ranks: int = 1,
    pinned: bool = False,
    spare: int = 0,
    clock: Callable[[], int] = time.time_ns,
    patience_s: float = PATIENCE_S,
    separate_groups: bool = False,
) -> KeptPool | None:
    """Open the files of a tier with `keep`. Missing files are created at the first block write.

    Args:
        model: the shape of the model. Its `fingerprint` must not be empty.
        tier: its path, its budget and its layout.
        block_tokens: tokens per block.
        layout: layout of a layer of a block, or None for the tier's.
        rank: the tensor-parallel rank of this part of the KV.
        ranks: number of ranks, each with a separate file numbered after the path.
        pinned: whether to register the memory with CUDA.
        spare: blocks of memory beyond the slots.
        clock: the wall clock in nanoseconds.
        patience_s: seconds to wait for the lock of a dead process.
        separate_groups: whether the model's layer groups are separate.

    Returns:
        The pool, or None with a log warning if another process has a file.

    Raises:
        ConfigError: a model without a fingerprint, a layout with separate K and V, a path outside a
            memory file system, or a file with a different content without `keep_replace`.
        TransferError: the file system has no room.
    """
    assert tier.keep is not None  # noqa: S101 - checked by callers
    path = Path(tier.keep if ranks == 1 else f"{tier.keep}-{rank}").absolute()
    require_fingerprint(model, f"the kept file {path}")
    if separate_groups:
        groups = GroupSlots.of_tier(model, tier, block_tokens, separate_groups=True)
    else:
        room = tier.room(model, block_tokens)
        groups = (GroupSlots.of(model, room, block_tokens, layout or tier.layout),)
    if not separate_groups and len(groups[0].block_format.planes()) != 1:
        raise ConfigError("a kept file has K and V of a layer together: use Layout(kv='joined')")
    files = _Files(model, tier, block_tokens, groups, path, rank, spare)
    with ExitStack() as opened:
        tables = files.tables(opened, patience_s)
        pool = None if tables is None else files.pool(opened, tables, pinned=pinned, clock=clock)
        if pool is not None:
            opened.pop_all()
    return pool


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a tier."""

    model: ModelShape
    tier: Tier
    block_tokens: int
    groups: tuple[GroupSlots, ...]
    path: Path
    rank: int
    spare: int

    def tables(self, opened: ExitStack, patience_s: float) -> list[KeptFile] | None:
        """Open the file of each group's table, or return None if another process has a file."""
        check_memory(self.pages, self.size)
        found: list[KeptFile] = []
        for slots in self.groups:
            fmt, at, size = slots.block_format, self.path, slots.unit_bytes
            about = meaning(self.model, fmt.layout, self.block_tokens, self.rank, slots.group)
            if slots.group is not None:
                # A tool uses these sizes to find blocks in the pages.
                sizes = {"page_bytes": slots.page, "slot_bytes": slots.slot_bytes}
                about = json.dumps({**json.loads(about), **sizes}, sort_keys=True)
                at, size = _part(at, f"group{slots.group}"), LAYER_DIGEST
            file = open_kept_file(
                at,
                about,
                (fmt.layers, size, self.block_tokens, slots.blocks + self.spare),
                replace=self.tier.keep_replace,
                patience_s=patience_s,
            )
            if file is None:
                return None
            opened.callback(file.close)
            if file.cold is not None:
                _LOG.warning("%s: starts without blocks: %s", at, file.cold)
            found.append(file)
        return found

    def pool(
        self,
        opened: ExitStack,
        tables: Sequence[KeptFile],
        *,
        pinned: bool,
        clock: Callable[[], int],
    ) -> KeptPool | None:
        """Return the pool of the first group, linked to the pools of the other groups."""
        touch = not any(file.found for file in tables)
        pages, owners, pool = None, None, None
        if self.groups[0].group is None:
            memory = pool_of(tables[0], self.size, touch=touch)
        else:
            pages = PagesFile(self.pages, self.size, touch=touch)
            opened.callback(pages.close)
            owners, memory = PageOwners(self.groups, pages.fix_size), pages.memory
        for slots, file in zip(reversed(self.groups), reversed(tables), strict=True):
            pool = KeptPool(
                file,
                memory,
                self.model,
                slots.blocks,
                self.block_tokens,
                pinned=pinned and pages is None,
                spare=self.spare,
                clock=clock,
                slots=slots,
                pages=pages,
                owners=owners,
                rest=pool,
            )
        return pool

    @property
    def pages(self) -> Path:
        """The file of the blocks."""
        return self.path if self.groups[0].group is None else _part(self.path, "pages")

    @property
    def size(self) -> int:
        """Bytes of the blocks."""
        return self.groups[0].nbytes + self.spare * self.groups[0].page


def _part(base: Path, name: str) -> Path:
    return base.with_name(f"{base.name}-{name}")
