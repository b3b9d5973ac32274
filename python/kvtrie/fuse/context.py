"""Context: the chunks of a request in order, and the query that follows them.

Text is cut before it is made into tokens, and each piece becomes tokens alone: equal text gives
equal tokens, whatever was before it. Invariant: a chunk has at least one token, a query too.
Cost: one pass over the text, one call of the tokenizer per piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import few, pairs, shown, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, Self

    from numpy.typing import NDArray

    Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

__all__ = ["Chunk", "Context", "Tokenizer", "as_tokens"]

_ENDS = ("\n", ". ", "! ", "? ")
_MOST = 2**32
_MOST_PIECES = 2**20
_MOST_LAYERS = 2**16
_MOST_POSITIONS = 2**24  # tables of cosines and sines are made up to there


class Tokenizer(Protocol):
    """Makes text into tokens, as those of transformers do."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text, without those that begin or end a sequence."""
        ...


class Chunk:
    """A piece of text as tokens, with its KV if the caller has it already.

    Args:
        tokens: at least one.
        kv: per layer K `(n, kv_heads, head_dim)` and V `(n, kv_heads, v_head_dim)` of its n tokens;
            None looks in the store.
        at: the position that K of the first token is rotated to; with `kv` only.

    Attributes:
        tokens: int64 `(n,)`.
        kv: as given.
        at: as given.

    Raises:
        ConfigError: no token, one out of range, KV of another number of tokens, or a position
            below 0 or without KV.
    """

    __slots__ = ("at", "kv", "tokens")

    def __init__(
        self,
        tokens: Tokens,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        at: int = 0,
    ) -> None:
        self.tokens = as_tokens("chunk", tokens)
        if not len(self.tokens):
            raise ConfigError("a chunk of 0 tokens")
        self.at = whole("at", at, 0, _MOST_POSITIONS)
        if self.at and kv is None:
            raise ConfigError(f"at is {at}: only a chunk that comes with its KV has a position")
        self.kv = None if kv is None else pairs("kv", kv, _MOST_LAYERS)
        for layer, (keys, values) in enumerate(self.kv or ()):
            for name, each in (("K", keys), ("V", values)):
                if not isinstance(each, torch.Tensor) or not each.dim():
                    raise ConfigError(
                        f"layer {layer} of a chunk has {name} {shown(each)}, a tensor wanted"
                    )
            if len(keys) != len(self.tokens) or len(values) != len(self.tokens):
                raise ConfigError(
                    f"layer {layer} of a chunk of {len(self.tokens)} tokens has {len(keys)} K and "
                    f"{len(values)} V"
                )

    def __repr__(self) -> str:
        given = "" if self.kv is None else f", kv of {len(self.kv)} layers at {self.at}"
        return f"Chunk({len(self.tokens)} tokens{given})"


class Context:
    """The input of a request to fuse: its chunks in order, and its query.

    Args:
        chunks: chunks, or their tokens, in order; there may be none.
        query: tokens after the chunks, at least one: they are always computed.

    Attributes:
        chunks: a tuple of `Chunk`.
        query: int64 `(m,)`.

    Raises:
        ConfigError: an empty chunk or query, or a token out of range.
    """

    __slots__ = ("chunks", "query")

    def __init__(self, chunks: Iterable[Chunk | Tokens], query: Tokens) -> None:
        given = few("chunks", chunks, _MOST_PIECES)
        self.chunks = tuple(one if isinstance(one, Chunk) else Chunk(one) for one in given)
        self.query = as_tokens("query", query)
        if not len(self.query):
            raise ConfigError("a query of 0 tokens: at least 1 wanted, whose answer is computed")

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        texts: str | Iterable[str],
        query: str,
        *,
        separator: str | None = None,
        size: int | None = None,
    ) -> Self:
        """Return a context of strings, whose pieces become tokens one by one.

        Args:
            tokenizer: the model's.
            texts: a text, or several; none of their pieces goes over from one to the next.
            query: the question, as text.
            separator: cut after each occurrence, which stays at the end of its piece.
            size: the most characters of a piece, which is cut at its last end of a sentence, else
                after its last space, else at `size`. With neither, a text is one chunk.

        Raises:
            ConfigError: both ways to cut, an empty separator, a size below 1, a text that is no
                str or has lone surrogates, or a query without a token.
        """
        if separator is not None:
            separator = _text("separator", separator)
        if size is not None:
            size = whole("size", size, 1, _MOST)
        if (separator is not None and size is not None) or separator == "":
            raise ConfigError(f"separator {separator!r} and size {size}: one of them, or neither")
        chunks: list[Chunk] = []
        given = [texts] if isinstance(texts, str) else few("texts", texts, _MOST_PIECES)
        for at, one in enumerate(given):
            text = _text(f"texts[{at}]", one)
            pieces = [text]
            if separator is not None:
                pieces = _split_after(text, separator)
            elif size is not None:
                pieces = _within(text, size)
            encoded = (tokenizer.encode(piece, add_special_tokens=False) for piece in pieces)
            chunks += [Chunk(tokens) for tokens in encoded if len(tokens)]
        return cls(chunks, tokenizer.encode(_text("query", query), add_special_tokens=False))

    def __repr__(self) -> str:
        tokens = sum(len(chunk.tokens) for chunk in self.chunks)
        return f"Context({len(self.chunks)} chunks of {tokens} tokens, query of {len(self.query)})"


def as_tokens(name: str, tokens: Tokens) -> NDArray[np.int64]:
    """Tokens as int64.

    Raises:
        ConfigError: anything but integers from 0 to 2**32 - 1 in one row.
    """
    try:
        given = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"a {name} is of tokens: {error}") from error
    if not given.size and given.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= _MOST:
        raise ConfigError(
            f"a {name} is of tokens, integers from 0 to 2**32 - 1, not {shown(tokens)}"
        )
    return given.astype(np.int64)


def _text(name: str, given: object) -> str:
    """Return a str that a tokenizer can encode."""
    if not isinstance(given, str):
        raise ConfigError(f"{name} is {shown(given)}, a str wanted")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} has {given[error.start]!a} at {error.start}: {error.reason}"
        ) from error
    return given


def _split_after(text: str, separator: str) -> list[str]:
    parts = text.split(separator)
    return [piece for piece in (*(part + separator for part in parts[:-1]), parts[-1]) if piece]


def _within(text: str, size: int) -> list[str]:
    pieces: list[str] = []
    while len(text) > size:
        ends = [text.rfind(end, 0, size) + len(end) for end in _ENDS if end in text[:size]]
        cut = max(ends, default=text.rfind(" ", 0, size) + 1) or size
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text] if text else pieces
