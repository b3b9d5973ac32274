"""Path: blocks from the root, used by SGLang as a node, and keys converted for the manager.

Invariant: a path does not change. Cost: a key is read once per call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from kvtrie.engines.server.tenant import tenant_of_key
from kvtrie.settings.argument import text
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from kvtrie.engines.server.tenant import Sharing
    from kvtrie.engines.sglang.locks import Lock
    from kvtrie.engines.sglang.misses import Matched

__all__ = ["Path", "found", "tokens_of"]

_MOST_TOKEN = 2**32


class Path:
    """Blocks from the root, used by SGLang as a node.

    Args:
        blocks: handles of the blocks, in order.
        key: the empty tokens of the root, None for all further paths.
        matched: the request matched to this path, if its tokens are to be counted.

    Attributes:
        locks: the locks held on the path.
    """

    __slots__ = ("blocks", "key", "locks", "matched")

    def __init__(
        self,
        blocks: NDArray[np.uint64],
        key: RadixKey | None = None,
        matched: Matched | None = None,
    ) -> None:
        self.blocks = blocks
        self.key = key
        self.matched = matched
        self.locks: list[Lock] = []


def found(
    tokens: int, path: Path, known: int | None = None, grid: int | None = None
) -> MatchResult:
    """Return SGLang's result of a match.

    Args:
        tokens: length of the match.
        path: its blocks.
        known: tokens known to full attention, if groups of layers have separate pools. If this is
            more than `tokens`, a pass ending there keeps a window for the next request.
        grid: distance, in tokens, of borders at which a pass can keep a state. None without states.
    """
    result = MatchResult(
        device_prefix_len=tokens,
        last_device_node=path,
        last_host_node=path,
        best_match_node=path,
    )
    if known is None:
        return result
    branch = known if known > tokens else None
    state = None if grid is None else known // grid * grid
    return result._replace(
        full_kv_hit_length=known,
        swa_branching_seqlen=branch,
        mamba_branching_seqlen=state if state is not None and state > tokens else None,
    )


def tokens_of(
    key: RadixKey, page_size: int, sharing: Sharing | None = None
) -> tuple[NDArray[np.uint32], Scope] | None:
    """Return the whole pages of a key and their scope, None for a key that is not cached.

    A key is not cached if it has no whole page, or ids beyond 32 bits, as SGLang makes them for
    images. If tenants share blocks, a key with neither a salt nor a signed tenant is not cached
    either.

    Raises:
        ConfigError: the salt or extra key is not a valid scope.
    """
    raw = np.asarray(key.raw_token_ids(), dtype=np.int64)
    raw = raw[: len(raw) // page_size * page_size]
    if not len(raw) or raw.min() < 0 or raw.max() >= _MOST_TOKEN:
        return None
    # An empty name is no name for SGLang. Values except None and str are refused.
    salt, extra = (
        "" if given is None else text(name, given)
        for name, given in (("cache_salt", key.cache_salt), ("extra_key", key.extra_key))
    )
    if sharing is None:
        return raw.astype(np.uint32), Scope(tenant=salt.encode(), lora=extra)
    signed = tenant_of_key(extra, sharing.secret)
    if signed is not None:
        scope = Scope(tenant=signed[0], lora=signed[1], share_after=sharing.after)
        return raw.astype(np.uint32), scope
    return (raw.astype(np.uint32), Scope(tenant=salt.encode(), lora=extra)) if salt else None
