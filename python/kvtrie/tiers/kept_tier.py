"""Opening the memory of a host tier with `keep`: its files, and pools over them.

Where the groups of a model's layers are kept apart, the pages of all groups are one file,
`PATH-pages`, and each group has a table of its slots, `PATH-groupN`: a kept file whose pool holds
digests of the slots' layers instead of their bytes. A group that takes a page over empties the
entries that other groups have there before its first byte is copied:

```text
PATH-pages    | page 0: group 0      | page 1: group 1 | page 2: group 0  ...
PATH-group0   [ entries 0 to 4      ]  5 to 9: empty    [ entries 10 to 14 ]
PATH-group1     0: empty             [ entry 1         ]  2: empty
```

A resume point whose parts are not all found is no point again.
Invariant: after an error, or if another process has a file, no file stays open and none is changed.
Cost: that of mapping the memory.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError
from kvtrie.model.group_pages import LAYER_DIGEST
from kvtrie.model.shape import require_fingerprint
from kvtrie.tiers.group_slots import GroupSlots
from kvtrie.tiers.kept import KeptPool
from kvtrie.tiers.kept_file import PATIENCE_S, advise, check_memory, mapped, open_kept_file
from kvtrie.tiers.meaning import meaning
from kvtrie.tiers.page_owners import PageOwners
from kvtrie.tiers.pages_file import PagesFile

if TYPE_CHECKING:
    from collections.abc import Callable

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
    apart: bool = False,
) -> KeptPool | None:
    """Open the files of a tier with `keep`, or make them with the first block that is written.

    Args:
        model: the shape whose KV is kept; its `fingerprint` may not be empty.
        tier: its path, its budget and its layout.
        block_tokens: tokens per block.
        layout: layout of a layer of a block; None is the tier's.
        rank: the tensor-parallel rank whose part of the KV this is.
        ranks: how many there are; each has a separate file, with its number after the path.
        pinned: whether to register the memory with CUDA.
        spare: blocks of memory beyond those of the slots.
        clock: the wall clock in nanoseconds.
        patience_s: seconds to wait for the lock of a process that has died.
        apart: whether the groups of the model's layers are kept apart.

    Returns:
        The pool; None if another process has a file, of which the log warns.

    Raises:
        ConfigError: a model without a fingerprint, a layout with K and V apart, a path outside a
            memory file system, a file with something else unless `keep_replace`.
        TransferError: the file system has no room.
    """
    assert tier.keep is not None  # noqa: S101 - its callers look
    path = Path(tier.keep if ranks == 1 else f"{tier.keep}-{rank}").absolute()
    require_fingerprint(model, f"the kept file {path}")
    layout = layout or tier.layout
    groups = (
        GroupSlots.of_tier(model, tier, block_tokens, apart=True)
        if apart
        else (GroupSlots.of(model, tier.room(model, block_tokens), block_tokens, layout),)
    )
    if not apart and len(groups[0].block_format.planes()) != 1:
        raise ConfigError("a kept file has K and V of a layer together: use Layout(kv='joined')")
    size = groups[0].nbytes + spare * groups[0].page
    check_memory(_part(path, "pages") if apart else path, size)
    files: list[KeptFile] = []
    pool, pages, owners = None, None, None
    with ExitStack() as opened:
        for slots in groups:
            fmt = slots.block_format
            file = open_kept_file(
                _part(path, f"group{slots.group}") if apart else path,
                _about(meaning(model, fmt.layout, block_tokens, rank, slots.group), slots),
                (
                    fmt.layers,
                    LAYER_DIGEST if apart else slots.unit_bytes,
                    block_tokens,
                    slots.blocks + spare,
                ),
                replace=tier.keep_replace,
                patience_s=patience_s,
            )
            if file is None:
                return None
            opened.callback(file.close)
            if file.cold is not None:
                _LOG.warning("%s: starts without blocks: %s", file.path, file.cold)
            files.append(file)
        touch = not any(file.found for file in files)
        if apart:
            pages = PagesFile(_part(path, "pages"), size, touch=touch)
            opened.callback(pages.close)
            owners, memory = PageOwners(groups, pages.settle), pages.memory
        else:
            whole = mapped(files[0])
            advise(whole, touch=touch)
            memory = torch.frombuffer(whole, dtype=torch.uint8)[:size]
        for slots, file in zip(reversed(groups), reversed(files), strict=True):
            pool = KeptPool(
                file,
                memory,
                model,
                slots.blocks,
                block_tokens,
                layout=layout,
                pinned=pinned and not apart,
                spare=spare,
                clock=clock,
                slots=slots,
                pages=pages,
                owners=owners,
                rest=pool,
            )
        opened.pop_all()
    return pool


def _about(about: str, slots: GroupSlots) -> str:
    """The meaning of blocks; of a group with the sizes by which a tool finds them in the pages."""
    if slots.group is None:
        return about
    sizes = {"page_bytes": slots.page, "slot_bytes": slots.block_format.layers * slots.unit_bytes}
    return json.dumps({**json.loads(about), **sizes}, sort_keys=True)


def _part(base: Path, name: str) -> Path:
    return base.with_name(f"{base.name}-{name}")
