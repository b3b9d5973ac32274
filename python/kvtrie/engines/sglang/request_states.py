"""RequestStates: the states of requests of models with state layers, and those that the tree takes.

SGLang's own component of its tree takes a state off a request and copies a cached one to it; it is
used as it is, and asks this cache for room and for the state of a path. Invariant: a state has one
owner: a request, a cached block or the allocator. Cost: that of SGLang's component.
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
    """A tree that knows the states of its paths."""

    def state_of(self, path: Path) -> torch.Tensor | None:
        """Return the slot of the state at the end of a path, if there is one."""
        ...


class _States:
    """The one question of the component to SGLang's tree."""

    def __init__(self, cache: _Tree) -> None:
        self._cache = cache

    def get_component_device_value(self, node: Path, kind: object) -> torch.Tensor | None:
        """The slot of the state at the end of a path."""
        del kind
        return self._cache.state_of(node)


class RequestStates:
    """States between requests and a cache.

    Args:
        cache: the cache.
        params: SGLang's `CacheInitParams`.

    Attributes:
        grid: tokens between the borders at which a pass can keep a state.
    """

    def __init__(self, cache: _Tree, params: CacheInitParams) -> None:
        self._component = MambaComponent(cast("Any", cache), params)
        self._component.tree_core = cast("Any", _States(cache))
        self.grid = int(self._component.mamba_checkpoint_grid)

    def matched(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """Give a request a slot for the state that it goes on from, and say which it copies."""
        return self._component.finalize_match_result_in_cache(params, result)

    def take(self, req: Any, params: InsertParams, tokens: int, *, finished: bool) -> int:  # noqa: ANN401 - SGLang's `Req`
        """Take a state off a request, into the parameters of an insert.

        Returns:
            Tokens before the state; 0 without one.
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
        """Free what the tree did not take, after an insert or without one."""
        self._component.cleanup_after_caching_req(req, finished, result, params)
