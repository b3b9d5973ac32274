"""Continuation: checks whether the prompt of a `generate` continues the tokens of a cache.

transformers' `generate` drops the first tokens of a prompt without comparing them with the tokens
read by its cache. While a selective cache is open, each `generate` of the model's class and its
bases first compares the whole prompt with the tokens of the cache.
Invariant: a prompt with a different beginning is refused before any change, also if `generate` is
called on the class. Without an open selective cache all classes are unchanged.
Cost: 8 bytes per token read and a comparison per `generate` over a selective cache. Any further
`generate` of a patched class checks the type of its cache.
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
_open: Counter[type] = Counter()  # open caches per class defining `generate`
_usual: dict[type, Callable[..., Any]] = {}  # the original `generate` of each class
_lock = Lock()


@runtime_checkable
class Prompted(Protocol):
    """A cache with a check of prompts."""

    def check_prompt(
        self, ids: torch.Tensor | None, mask: torch.Tensor | None, *, embedded: bool
    ) -> None:
        """Refuse a prompt with tokens different from the tokens read."""
        ...


class ReadTokens:
    """The tokens read by a cache, by row."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def append(self, ids: torch.Tensor | None, batch: int, count: int) -> None:
        """Append the tokens of a pass, int64 `(batch, count)`, or None for embeddings."""
        self._parts.append(torch.full((batch, count), _UNKNOWN) if ids is None else ids.clone())

    def clear(self) -> None:
        """Forget all tokens."""
        self._parts = []

    def crop(self, tokens: int) -> None:
        """Forget the last tokens."""
        if self._parts and tokens:
            self._parts = [self._whole()[:, :-tokens]]

    def select(self, rows: torch.Tensor) -> None:
        """Replace the rows by the rows at some indices, int64 `(n,)`."""
        if self._parts:
            whole = self._whole()
            self._parts = [whole.index_select(0, rows.to(whole.device))]

    def take(self, other: ReadTokens) -> None:
        """Copy the tokens of a second cache."""
        self._parts = list(other._parts)

    def check(self, ids: torch.Tensor, past: int, first: torch.Tensor | None) -> None:
        """Refuse a prompt with tokens different from the tokens read.

        Args:
            ids: int64 `(rows, columns)`, more columns than were read.
            past: number of columns read.
            first: int64 `(batch,)`, the number of columns before each row's first token. None
                without padding.

        Raises:
            ConfigError: different tokens, or unknown tokens because embeddings were read.
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
    """Check the prompts of each `generate` of a model and of the models in it, until `unwatch`.

    Returns:
        The patched classes, for `unwatch`.
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
    """Restore `generate` of classes without a further open cache."""
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
