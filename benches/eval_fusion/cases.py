"""Cases: a context of chunks, a question and the answer that is held against a full prefill.

Four kinds. In "split" a border cuts the sentence of the fact after the name that it is about; in
"header" the name ends a chunk as a title and the fact begins the next one; in "local" the sentence
is inside one chunk; "text" is running text cut into chunks, and its answer is how it goes on. The
facts are inside prose, with two more of other towns in other chunks: the right answer is not the
only number there.
Invariant: kind, seed and sizes decide a case, for one model. Cost: the tokenizer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benches.eval_fusion.prose import prose

if TYPE_CHECKING:
    from kvtrie.demo.model import Speaker

KINDS = ("split", "header", "local", "text")
PREFIX = "Notes on a programming language, and on the archives of some towns.\n\n"
TEXT_QUERY = 16
"""Tokens of running text after the chunks that are computed as the query."""

FEWEST = 4
"""Chunks that a case needs: two around a border and one for each other fact."""

TOWNS = (
    "Bergen", "Cadiz", "Dover", "Essen", "Faro", "Geneva", "Hamburg", "Izmir", "Krakow", "Lisbon",
    "Malmo", "Naples", "Odessa", "Porto", "Riga", "Seville", "Turin", "Utrecht", "Verona", "Zagreb",
)  # fmt: skip


class Sizes(NamedTuple):
    """How large a case is.

    Attributes:
        chunks: of a context.
        chunk: tokens of each.
        answer: tokens of running text that are the answer of kind "text".
    """

    chunks: int = 5
    chunk: int = 128
    answer: int = 63


class Case(NamedTuple):
    """One case; tokens throughout."""

    kind: str
    seed: int
    chunks: list[list[int]]
    query: list[int]
    answer: list[int]


def case_of(speaker: Speaker, kind: str, seed: int, sizes: Sizes) -> Case:
    """The case of a kind and a seed."""
    draw = np.random.default_rng([seed, KINDS.index(kind)])
    count, size = sizes.chunks, sizes.chunk
    if kind == "text":
        row = prose(speaker, draw, count * size + TEXT_QUERY + sizes.answer)
        rest = row[count * size :]
        chunks = [row[at * size : (at + 1) * size] for at in range(count)]
        return Case(kind, seed, chunks, rest[:TEXT_QUERY], rest[TEXT_QUERY:])
    town, *others = (TOWNS[at] for at in draw.choice(len(TOWNS), 3, replace=False))
    code, *codes = (str(each) for each in 1000 + draw.choice(9000, 3, replace=False))
    border = int(draw.integers(count - (kind != "local")))
    starts, middles, ends = ([""] * count for _ in range(3))
    taken = {border}
    if kind == "split":
        ends[border], starts[border + 1] = f" The access code of {town}", f" is {code}."
    elif kind == "header":
        ends[border] = f"\n\nThe archive of {town}\n\n"
        starts[border + 1] = f"The access code is {code}."
    else:
        middles[border] = f" The access code of {town} is {code}."
    if kind != "local":
        taken.add(border + 1)
    free = [at for at in range(count) if at not in taken]
    for at, other, number in zip(draw.permutation(free), others, codes, strict=False):
        middles[at] = f" The access code of {other} is {number}."
    pieces = zip(starts, middles, ends, strict=True)
    chunks = [_filled(speaker, draw, size, piece) for piece in pieces]
    opening = f"The access code of {town} is"
    query = f"\n\nQuestion: What is the access code of {town}?\nAnswer: {opening}"
    return Case(kind, seed, chunks, speaker.tokens(query), speaker.tokens(f" {code}"))


def _filled(
    speaker: Speaker, draw: np.random.Generator, size: int, words: tuple[str, str, str]
) -> list[int]:
    """A chunk of `size` tokens: words, prose, words somewhere in it, prose, words."""
    before, between, after = (speaker.tokens(each) for each in words)
    room = size - len(before) - len(between) - len(after)
    if room < 0:
        raise ValueError(f"chunks of {size} tokens: {size - room} wanted for the facts alone")
    filler = prose(speaker, draw, room)
    cut = int(draw.integers(room + 1))
    return [*before, *filler[:cut], *between, *filler[cut:], *after]
