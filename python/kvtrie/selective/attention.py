"""The binding to transformers: one attention function, `kvtrie`, and whose pass is running.

While a pass over a selective cache runs, the model's configuration names this function, and the
function hands queries, keys and values to the layer's cache. A pass ends by putting the
configuration back, also when it fails.
Invariant: passes without a selective cache never see this function; passes over selective caches of
one model wait for one another. Cost: a lock and two assignments per pass.
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
# Additions of some models to attention that rows in any order do not support.
_STRANGE = ("position_bias",)
_running = local()
# Of each configuration, which threads of a model share, the lock of its passes.
_locks: dict[int, Lock] = {}


class Layers(Protocol):
    """An object that holds a cache per layer."""

    @property
    def caches(self) -> Sequence[KVCache]:
        """Layer by layer."""
        ...


class Passing:
    """A pass of a model over selective caches, from `begin` to `end`.

    Args:
        config: the configuration that the model's attention reads.
    """

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - a PretrainedConfig
        self._config = config
        self._lock = _lock_of(config)
        self._before: tuple[str, bool | None] | None = None

    def begin(self, layers: Layers, *, grad: bool = False) -> None:
        """Let attention go to these caches, once no other thread runs such a pass.

        Args:
            layers: the caches.
            grad: whether the caches can be differentiated; rows of others are overwritten in place.

        Raises:
            ConfigError: another pass of this thread is running.
        """
        _refuse_nesting()
        self._lock.acquire()
        before = torch.is_grad_enabled()
        # An unchanged setting is not restored: an interrupted pass ends in other contexts.
        self._before = self._config._attn_implementation, None if before is grad else before  # noqa: SLF001
        self._config._attn_implementation = _NAME  # noqa: SLF001 - has no public name
        torch.set_grad_enabled(grad)
        _running.layers = layers

    def end(self) -> bool:
        """Put everything back as it was; whether a pass was running."""
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
    """Keep passes over selective caches waiting while a model is looked at or run without one.

    Raises:
        ConfigError: such a pass of this thread is running.
    """
    _refuse_nesting()
    with _lock_of(config):
        yield


def _lock_of(config: Any) -> Lock:  # noqa: ANN401 - a PretrainedConfig
    return _locks.setdefault(id(config), Lock())  # an id that returns finds a free one


def _refuse_nesting() -> None:
    if getattr(_running, "layers", None) is not None:
        raise ConfigError("a pass over a selective cache is running: passes do not nest")


def running(layers: object) -> bool:
    """Whether this thread runs a pass over these caches."""
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
    # Rows are masked by their positions; no mask is made for this function, so one of four axes
    # comes from the layer itself.
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
    """No mask: rows are masked by their positions."""
    _mine()


def _mine() -> Layers:
    """The caches of this thread's pass.

    Raises:
        ConfigError: the pass is a plain one, which found the configuration of another thread's.
    """
    layers: Layers | None = getattr(_running, "layers", None)
    if layers is None:
        raise ConfigError(
            "another thread runs this model over a selective cache: let passes follow one another"
        )
    return layers


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
