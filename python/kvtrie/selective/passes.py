"""Passes: hooks for the passes of a model over a selective cache.

A hook of the decoder admits or refuses a pass before it runs, a second hook ends the pass, and a
hook of the rotary module supplies the rotation tables of the cache.
Invariant: a refused pass has changed nothing. After a pass that failed midway the cache is refused
until it is reset. Passes without the cache are unchanged. Cost: a check of the model and the
arguments per pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.engines.identity.model_state import ModelState
from kvtrie.engines.transformers.guard import Guard, columns, named, no_gradients
from kvtrie.errors import ClosedError, ConfigError
from kvtrie.selective.attention import Passing, running
from kvtrie.selective.continuation import unwatch, watch
from kvtrie.selective.padding import first_columns
from kvtrie.selective.steps import too_long

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle
    from transformers import Cache, PreTrainedModel

    from kvtrie.selective.buffered import KVCacheWithBuffers
    from kvtrie.selective.layers import LayerCaches

__all__ = ["Passes"]


class Passes:
    """The passes of a model over a cache, from its opening until `close`.

    Args:
        model: the model of the cache.
        decoder: its decoder, with a rotary module.
        cache: the cache object of the passes, weakly referenced.
        layers: the layers' caches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Any,  # noqa: ANN401 - a module of transformers
        cache: Cache,
        layers: LayerCaches,
    ) -> None:
        self._model = model
        self._guard = Guard(model)
        self._cache = weakref.ref(cache)
        self._layers = layers
        self._passing = Passing(decoder.config)
        self._torn = False
        # Running pass: columns before it, its tokens, its rows and columns.
        self._arriving: tuple[int, torch.Tensor | None, int, int] | None = None
        hooks = [
            decoder.register_forward_pre_hook(_weakly(self._before), with_kwargs=True),
            decoder.register_forward_hook(_weakly(self._after), always_call=True),
            decoder.rotary_emb.register_forward_hook(_weakly(self._turned), with_kwargs=True),
        ]
        self._end_of_life = weakref.finalize(self, _let_go, hooks, layers.caches, watch(model))
        self._end_of_life.atexit = False

    @property
    def alive(self) -> bool:
        """Whether the cache is not closed."""
        return self._end_of_life.alive

    def check_open(self) -> None:
        """Check whether the cache can read tokens.

        Raises:
            ClosedError: the cache was closed, or a pass failed midway.
        """
        self.check_alive()
        if self._torn:
            raise ClosedError(
                "a pass over this SelectiveCache ended midway: reset() or open another"
            )

    def check_alive(self) -> None:
        """Check whether the cache is open.

        Raises:
            ClosedError: the cache was closed.
        """
        if not self.alive:
            raise ClosedError("the SelectiveCache is closed: open another")

    def reset(self) -> None:
        """Forget all tokens, also after a pass that failed midway."""
        self._layers.reset()
        self._torn = False

    def close(self) -> None:
        """Restore the model and release the caches' memory. Idempotent."""
        self._passing.end()
        self._end_of_life()

    def _before(
        self,
        decoder: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begin a pass over this cache. Runs before each pass of the model."""
        # torch passes no keywords if a concurrent thread adds or removes the hook during this pass.
        if kwargs is None:
            return
        given = named(decoder, args, kwargs)
        cache = given.get("past_key_values")
        if cache is None or cache is not self._cache():
            return
        self._after()  # ends an interrupted earlier pass
        self.check_open()
        self._guard.ready()
        no_gradients(decoder, given)
        self._passing.begin(self._layers)
        try:
            self._admit(given)
        except BaseException:
            self._passing.end()
            raise

    def _admit(self, given: dict[str, Any]) -> None:
        """Prepare the layers' caches for a pass, or refuse the pass and change nothing."""
        ids = given.get("input_ids")
        if ids is None:
            ids = given.get("inputs_embeds")
        if ids is None:
            raise ConfigError("a pass has neither input_ids nor inputs_embeds")
        layers = self._layers
        batch, new = ids.shape[:2]
        past, times = layers.length, batch // layers.batch
        state = ModelState.of(self._model)
        if past and layers.model_state is not None and not state.same(layers.model_state):
            raise ConfigError(
                f"the model has changed since this cache read its {past} tokens: reset() the "
                "SelectiveCache or open another"
            )
        if batch % layers.batch:
            raise ConfigError(_other_batch(layers, batch))
        first = first_columns(
            given.get("attention_mask"), batch, past, new, layers.caches[0].first, times
        )
        pad = ids.new_zeros(batch, dtype=torch.int64) if first is None else first
        if columns(given, new, past, pad.to(ids.device)):
            raise ConfigError(
                f"a pass of {new} tokens from position 0 on, and this cache has read {past}: pass "
                "only what follows them; assisted generation and prompt lookup begin so, and take "
                "tokens back, which no cache does that evicts"
            )
        most = layers.largest_step
        if not most:
            raise too_long(layers.caches, past, past + new)
        if not 0 < new <= most:
            raise ConfigError(
                f"a pass of {new} tokens after {past}, and the next step of this cache has 1 to "
                f"{most}: let kvtrie.selective.generate or SelectiveCache.read cut it"
            )
        (layers.rope.fixed or layers.rope.fix(new, past)).check(past + new - int(pad.min()))
        if times > 1:
            layers.repeat(times)
        for cache in layers.caches:
            cache.pad(first)
        layers.model_state = state
        self._arriving = past, given.get("input_ids"), batch, new

    def _after(self, *_: object) -> None:
        """End a pass, also after an error."""
        if running(self._layers) and self._passing.end():
            read = {cache.input_pos for cache in self._layers.caches}
            self._torn = len(read) > 1
            arriving, self._arriving = self._arriving, None
            if arriving is not None and read != {arriving[0]}:
                self._layers.read.append(*arriving[1:])

    def _turned(self, _: torch.nn.Module, *given_to_it: Any) -> object:  # noqa: ANN401 - torch's
        """Return the rotation tables for passes over this cache. Hook of the rotary module."""
        rope = self._layers.rope.fixed
        # Three, but without keywords while a concurrent thread adds or removes this hook.
        if rope is None or not running(self._layers) or len(given_to_it) != 3:  # noqa: PLR2004
            return None
        args, kwargs, _out = given_to_it
        names = ("x", "position_ids", "layer_type")
        given = dict(zip(names, args, strict=False)) | kwargs
        return rope.rotation(given["x"], given["position_ids"], given.get("layer_type"))


def _other_batch(layers: LayerCaches, batch: int) -> str:
    if layers.length:
        return f"a batch of {batch} does not continue {layers.batch} rows"
    return (
        f"a batch of {batch} for a SelectiveCache of {layers.batch} rows: open one with "
        f"batch={batch}"
    )


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a method while its object is alive."""
    method_of = weakref.WeakMethod(method)

    def hook(*given: object) -> object:
        found = method_of()
        return None if found is None else found(*given)

    return hook


def _let_go(
    hooks: list[RemovableHandle],
    caches: list[KVCacheWithBuffers],
    watched: list[type],
) -> None:
    """Remove the hooks and release the memory."""
    unwatch(watched)
    for hook in hooks:
        hook.remove()
    for cache in caches:
        cache.buffers.deallocate()
