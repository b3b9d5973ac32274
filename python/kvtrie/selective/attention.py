"""Attention: the attention function `kvtrie` for transformers, and the passes using it.

While a pass over a selective cache runs, the model's configuration names this function, and the
function gives queries, keys and values to the layer's cache. The configuration is restored when
the pass ends or fails.
Invariant: passes without a selective cache never see this function. Passes over selective caches of
the same model run in turn. Cost: a lock and two assignments per pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock, local
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvtrie.errors import ConfigError
from kvtrie.kernels import Terms

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from kvtrie.selective.cache import KVCache

__all__ = ["Layers", "Passing", "between_passes", "running"]

_NAME = "kvtrie"
# Attention arguments of some models, not supported for rows in any order.
_STRANGE = ("position_bias",)
_running = local()
# Lock of the passes by `id` of the configuration, shared by the threads of a model.
_locks: dict[int, Lock] = {}


class Layers(Protocol):
    """An object with a cache per layer."""

    @property
    def caches(self) -> Sequence[KVCache]:
        """The caches, layer by layer."""
        ...


class Passing:
    """A pass of a model over selective caches, from `begin` to `end`.

    Args:
        config: the configuration of the model's attention.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - a PretrainedConfig
        self._config = config
        self._lock = _lock_of(config)
        self._before: tuple[str, bool | None] | None = None

    def begin(self, layers: Layers, *, grad: bool = False) -> None:
        """Direct attention to these caches, after waiting for passes of concurrent threads.

        Args:
            layers: the caches.
            grad: whether the caches can be differentiated. Without it, rows are overwritten in
                place.

        Raises:
            ConfigError: a pass of this thread is already running.
        """
        _refuse_nesting()
        self._lock.acquire()
        before = torch.is_grad_enabled()
        # An unchanged setting is not restored: an interrupted pass may end in a changed context.
        self._before = self._config._attn_implementation, None if before is grad else before  # noqa: SLF001
        self._config._attn_implementation = _NAME  # noqa: SLF001 - has no public name
        torch.set_grad_enabled(grad)
        _running.layers = layers

    def end(self) -> bool:
        """Restore the configuration and return whether a pass was running."""
        if self._before is None:
            return False
        _running.layers = None
        self._config._attn_implementation, grad = self._before  # noqa: SLF001
        if grad is not None:
            torch.set_grad_enabled(grad)
        self._before = None
        self._lock.release()
        return True


@contextmanager
def between_passes(config: Any) -> Generator[None]:  # noqa: ANN401 - a PretrainedConfig
    """Block passes over selective caches while a model is inspected or run without a cache.

    Raises:
        ConfigError: a pass of this thread is running.
    """
    _refuse_nesting()
    with _lock_of(config):
        yield


def _lock_of(config: Any) -> Lock:  # noqa: ANN401 - a PretrainedConfig
    return _locks.setdefault(id(config), Lock())  # a reused id finds a free lock


def _refuse_nesting() -> None:
    if getattr(_running, "layers", None) is not None:
        raise ConfigError("a pass over a selective cache is running: passes do not nest")


def running(layers: object) -> bool:
    """Return whether this thread runs a pass over these caches."""
    return getattr(_running, "layers", None) is layers


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,  # noqa: ANN401 - what transformers passes on
) -> tuple[torch.Tensor, None]:
    layers = _mine()
    # Rows are masked by their positions. transformers makes no mask for this function, so a mask of
    # four axes comes from the layer itself.
    if attention_mask is not None and attention_mask.dim() > 2:  # noqa: PLR2004 - rows and columns
        raise ConfigError(
            f"attention of {type(module).__name__} builds its own mask, which selective caches "
            "do not support"
        )
    strange = [name for name in _STRANGE if given.get(name) is not None]
    if strange or given.get("dropout"):
        raise ConfigError(
            f"attention of {type(module).__name__} wants {', '.join(strange) or 'dropout'}, which "
            "selective caches do not know"
        )
    index: Any = module.layer_idx
    cache = layers.caches[index]
    window = given.get("sliding_window")
    if window is not None and window != cache.span:
        raise ConfigError(
            f"layer {index} has a window of {window}, its configuration says {cache.span}"
        )
    softcap, sinks = given.get("softcap"), given.get("s_aux")
    cache.scale = given.get("scaling")
    cache.terms = None if softcap is None and sinks is None else Terms(softcap, sinks)
    return cache.forward(query, key, value).transpose(1, 2).contiguous(), None


def _mask(*_: object, **__: object) -> None:
    """Return no mask: rows are masked by their positions."""
    _mine()


def _mine() -> Layers:
    """Return the caches of this thread's pass.

    Raises:
        ConfigError: a plain pass, run while a concurrent thread has changed the configuration.
    """
    layers: Layers | None = getattr(_running, "layers", None)
    if layers is None:
        raise ConfigError(
            "another thread runs this model over a selective cache: let passes follow one another"
        )
    return layers


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
