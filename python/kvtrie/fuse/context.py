"""Context: the chunks of a request in order, and the query after them.

Text is cut first, and each piece is tokenized separately, so equal text gives equal tokens after
any other text. Invariant: chunks and queries have at least one token.
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
_MOST_POSITIONS = 2**24  # length limit of the tables of cosines and sines


class Tokenizer(Protocol):
    """A tokenizer with the interface of transformers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text, without the start and end tokens of a sequence."""
        ...


class Chunk:
    """A piece of text as tokens, with its KV if the caller has it already.

    Args:
        tokens: at least one.
        kv: per layer K `(n, kv_heads, head_dim)` and V `(n, kv_heads, v_head_dim)` of its n tokens.
            None looks in the store.
        at: position to which K of the first token is rotated, only with `kv`.

    Attributes:
        tokens: int64 `(n,)`.
        kv: as given.
        at: as given.

    Raises:
        ConfigError: no token, a token out of range, KV of a different number of tokens, or a
            position below 0 or without KV.
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
        chunks: chunks, or their tokens, in order. May be empty.
        query: tokens after the chunks, always computed. At least 1.

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
        """Return a context of strings. Each piece is tokenized separately.

        Args:
            tokenizer: the model's.
            texts: a text, or several. No piece crosses the border of two texts.
            query: the question, as text.
            separator: text to cut after. It stays at the end of its piece.
            size: most characters of a piece. Pieces are cut at the last end of a sentence, else
                after the last space, else at `size`. Without `separator` and `size` a text is a
                single chunk.

        Raises:
            ConfigError: both `separator` and `size`, an empty separator, a size below 1, a text
                that is not a str or has lone surrogates, or a query without a token.
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
    """Return tokens as int64.

    Raises:
        ConfigError: anything but a single row of integers from 0 to 2**32 - 1.
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
    """Refuse anything but a str without lone surrogates."""
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
