"""Continuation: whether the prompt of a `generate` goes on from the tokens that a cache has read.

transformers' `generate` cuts as many tokens off a prompt as its cache has read, whatever they are,
so a pass sees only the rest. While a selective cache is open, each `generate` of the model's class
and its bases is preceded by a comparison of the whole prompt with what the cache has read.
Invariant: a prompt that does not continue the cache is refused before anything changes, also where
`generate` is called on the class; without an open selective cache all classes are as they were.
Cost: 8 bytes per token that was read, one comparison per `generate` over a selective cache, and one
look at the cache per other `generate` of such a class.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch and transformers leave parts untyped)

from __future__ import annotations

from collections import Counter
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from transformers import GenerationMixin

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ReadTokens", "unwatch", "watch"]

_UNKNOWN = -1
_open: Counter[type] = Counter()  # caches of models of each class with a `generate` of its own
_usual: dict[type, Callable[..., Any]] = {}  # their own
_lock = Lock()


@runtime_checkable
class Prompted(Protocol):
    """A cache that compares a prompt with what it has read."""

    def check_prompt(
        self, ids: torch.Tensor | None, mask: torch.Tensor | None, *, embedded: bool
    ) -> None:
        """Refuse a prompt that does not continue the cache."""
        ...


class ReadTokens:
    """The tokens that a cache has read, by row."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def append(self, ids: torch.Tensor | None, batch: int, count: int) -> None:
        """Take the tokens of a pass, int64 `(batch, count)`; None where it was given embeddings."""
        self._parts.append(torch.full((batch, count), _UNKNOWN) if ids is None else ids.clone())

    def clear(self) -> None:
        """Forget all of them."""
        self._parts = []

    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""
        if self._parts and tokens:
            self._parts = [self._whole()[:, :-tokens]]

    def select(self, rows: torch.Tensor) -> None:
        """Let the rows become those at some indices, int64 `(n,)`."""
        if self._parts:
            whole = self._whole()
            self._parts = [whole.index_select(0, rows.to(whole.device))]

    def take(self, other: ReadTokens) -> None:
        """Become what another cache has read."""
        self._parts = list(other._parts)

    def check(self, ids: torch.Tensor, past: int, first: torch.Tensor | None) -> None:
        """Refuse a prompt that is another sequence than what was read.

        Args:
            ids: int64 `(rows, columns)`, more columns than were read.
            past: columns that were read.
            first: int64 `(batch,)`, the columns before each row's first token; None for none.

        Raises:
            ConfigError: other tokens, or tokens that are not known.
        """
        read = self._whole() if self._parts else torch.empty((1, 0), dtype=torch.int64)
        rows = max(len(read), len(ids))
        if read.shape[1] != past or bool((read == _UNKNOWN).any()):
            raise ConfigError(
                f"the cache has read {past} tokens, not all of which are known, as embeddings were "
                "given: generate can compare no prompt with them; pass only the new tokens to the "
                "model or to SelectiveCache.read"
            )
        if rows % len(read) or rows % len(ids):
            raise ConfigError(f"a prompt of {len(ids)} rows does not continue {len(read)} rows")
        mine = ids[:, :past].to(read.device).repeat_interleave(rows // len(ids), dim=0)
        apart = mine != read.repeat_interleave(rows // len(read), dim=0)
        if first is not None:
            begin = first.to(read.device).repeat_interleave(rows // len(first))
            apart &= torch.arange(past, device=read.device) >= begin[:, None]
        if bool(apart.any()):
            row, at = cast("list[int]", apart.nonzero()[0].tolist())
            raise ConfigError(
                f"row {row} of the prompt is another sequence than the cache has read from token "
                f"{at} of {past} on: reset() the SelectiveCache or open another"
            )

    def _whole(self) -> torch.Tensor:
        device = self._parts[-1].device
        self._parts = [torch.cat([part.to(device) for part in self._parts], dim=1)]
        return self._parts[0]


def watch(model: torch.nn.Module) -> list[type]:
    """Compare the prompts of each `generate` of a model and of the models in it, until `unwatch`.

    Returns:
        What `unwatch` takes.
    """
    kinds = {type(one) for one in cast("Iterable[torch.nn.Module]", model.modules())}
    mine = (base for kind in kinds if issubclass(kind, GenerationMixin) for base in kind.__mro__)
    found = [*dict.fromkeys(base for base in mine if "generate" in vars(base))]
    with _lock:
        for base in found:
            if not _open[base]:
                _usual[base] = vars(base)["generate"]
                base.generate = _compared(_usual[base])
            _open[base] += 1
    return found


def unwatch(classes: Iterable[type]) -> None:
    """Leave `generate` as it was where no other cache is open."""
    with _lock:
        for base in classes:
            _open[base] -= 1
            if not _open[base]:
                usual = _usual.pop(base)
                if vars(base)["generate"].__module__ == __name__:
                    base.generate = usual


def _compared(generate: Callable[..., Any]) -> Callable[..., Any]:
    def compared(model: torch.nn.Module, *args: Any, **given: Any) -> Any:  # noqa: ANN401
        cache = given.get("past_key_values")
        if isinstance(cache, Prompted):
            ids = args[0] if args else given.get("inputs")
            ids = given.get("input_ids") if ids is None else ids
            embedded = given.get("inputs_embeds") is not None
            cache.check_prompt(ids, given.get("attention_mask"), embedded=embedded)
        return generate(model, *args, **given)

    made = wraps(generate)(compared)
    made.__module__ = __name__
    return made
