"""Prose: paragraphs of the Python language reference, which every interpreter carries with it.

Invariant: the same seed gives the same tokens under the same version of Python. Cost: one pass over
700 kB of text per process, and the tokenizer's over what is drawn.
"""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from kvtrie.demo.model import Speaker

LEAST = 120
"""Characters of a paragraph; shorter ones are headings, labels and lines of grammar."""

CHARACTERS = 7
"""Of a token, at most on average; more are drawn if these give too few tokens."""


@cache
def paragraphs() -> list[str]:
    """Those that begin at a line's start with a letter, each on one line, by topic."""
    every = (each for name in sorted(topics) for each in topics[name].split("\n\n"))
    return [
        " ".join(each.split())
        for each in every
        if len(each) >= LEAST and each.lstrip("\n")[0].isalpha()
    ]


def prose(speaker: Speaker, draw: np.random.Generator, tokens: int) -> list[int]:
    """Return `tokens` tokens of running text, from a paragraph that is drawn."""
    every = paragraphs()
    start, characters = int(draw.integers(len(every))), tokens * CHARACTERS
    while True:
        text, at = "", start
        while len(text) < characters:
            text += every[at % len(every)] + "\n\n"
            at += 1
        found = speaker.tokens(text)
        if len(found) >= tokens:
            return found[:tokens]
        characters *= 2
