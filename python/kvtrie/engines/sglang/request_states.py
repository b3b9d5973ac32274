"""RequestStates: moves states between requests and the cache, for models with state layers.

A component of SGLang's tree takes a state from a request, and copies a cached state to a request.
The component is used unchanged, and asks this cache for room and for the state of a path.
Invariant: a state has a single owner: a request, a cached block or the allocator. Cost: that of
SGLang's component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import (
        InsertParams,
        InsertResult,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from kvtrie.engines.sglang.path import Path

__all__ = ["RequestStates"]


class _Tree(Protocol):
    """A tree with states of paths."""

    def state_of(self, path: Path) -> torch.Tensor | None:
        """Return the slot of the state at the end of a path, None without a state."""
        ...


class _States:
    """Replacement for SGLang's tree, with the only method called by the component."""

    def __init__(self, cache: _Tree) -> None:
        self._cache = cache

    def get_component_device_value(self, node: Path, kind: object) -> torch.Tensor | None:
        """Return the slot of the state at the end of a path."""
        del kind
        return self._cache.state_of(node)


class RequestStates:
    """States between requests and a cache.

    Args:
        cache: the cache.
        params: SGLang's `CacheInitParams`.

    Attributes:
        grid: distance, in tokens, of borders at which a pass can keep a state.
    """

    def __init__(self, cache: _Tree, params: CacheInitParams) -> None:
        self._component = MambaComponent(cast("Any", cache), params)
        self._component.tree_core = cast("Any", _States(cache))
        self.grid = int(self._component.mamba_checkpoint_grid)

    def matched(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """Give a request a slot for a cached state, and note the state to copy there."""
        return self._component.finalize_match_result_in_cache(params, result)

    def take(self, req: Any, params: InsertParams, tokens: int, *, finished: bool) -> int:  # noqa: ANN401 - SGLang's `Req`
        """Move a state from a request into the parameters of an insert.

        Returns:
            Number of tokens before the state, 0 without a state.
        """
        length = self._component.prepare_for_caching_req(req, params, tokens, finished)
        return tokens if length is None else length

    def give_back(
        self,
        req: Any,  # noqa: ANN401 - as above
        *,
        finished: bool,
        result: InsertResult | None = None,
        params: InsertParams | None = None,
    ) -> None:
        """Free states not taken by the tree, after an insert or without an insert."""
        self._component.cleanup_after_caching_req(req, finished, result, params)
