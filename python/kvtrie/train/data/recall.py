"""Recall: generated cases with early facts and a question at the end, without network access.

Invariant: a seed's cases are the same on every machine. Cost: a few draws per case.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import whole
from kvtrie.train.data.module import DataModule, Example

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Recall"]

_NAMES = (
    "Ada", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Iris", "Jonas", "Klara",
    "Leo", "Mira", "Nils", "Olga", "Paul", "Quinn", "Rosa", "Sven", "Tilda", "Ugo", "Vera",
    "Willem", "Xenia", "Yara", "Zeno",
)  # fmt: skip
_THINGS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink")
_FILLER = (
    "The train was late again and nobody minded.",
    "A light rain fell on the roofs of the town.",
    "Somebody had left a window open all night.",
    "The market opens early and closes before noon.",
    "Two dogs slept in the shade of the old wall.",
    "The road to the coast is longer than it looks.",
    "Bread was baked in the house at the corner.",
    "The clock in the hall has stopped at nine.",
    "Children carried water up from the river.",
    "Nothing else of note happened on that day.",
)
_MOST = 10**7


class Recall(DataModule):
    """Texts with early facts about coloured boxes and a final question about a box's colour.

    Args:
        cases: number of cases.
        words: approximate number of words of each case.
        facts: number of facts in each case, up to 26.
        **more: see `DataModule`.
    """

    labels: ClassVar[tuple[str, ...]] = tuple(f" {each}" for each in _THINGS)

    def __init__(self, *, cases: int = 200, words: int = 300, facts: int = 6, **more: Any) -> None:  # noqa: ANN401 - DataModule's
        super().__init__(**more)
        self.cases = whole("cases", cases, 1, _MOST)
        self.words = whole("words", words, 1, _MOST)
        self.facts = whole("facts", facts, 1, len(_NAMES))
        least = self.facts * 6 + 8
        if self.words < least:
            raise ConfigError(f"words is {words}: {facts} facts and a question have {least}")

    def examples(self) -> Sequence[Example]:
        """Return all cases."""
        return [self._case(random.Random(f"{self.seed} {at}")) for at in range(self.cases)]  # noqa: S311

    def _case(self, draw: random.Random) -> Example:
        names = draw.sample(_NAMES, self.facts)
        things = [draw.randrange(len(_THINGS)) for _ in names]
        facts = [
            f"{name} has a box that is {_THINGS[at]}."
            for name, at in zip(names, things, strict=True)
        ]
        chosen = draw.randrange(self.facts)
        question = f"Question: of which colour is the box of {names[chosen]}? Answer:"
        left = self.words - sum(len(each.split()) for each in (*facts, question))
        filler: list[str] = []
        while left > 0:
            filler.append(draw.choice(_FILLER))
            left -= len(filler[-1].split())
        # Facts are in the first fifth, between sentences of filler.
        text = filler[: len(filler) // 5]
        for each in facts:
            text.insert(draw.randint(0, len(text)), each)
        text += filler[len(filler) // 5 :]
        answer = self.labels[things[chosen]]
        return Example(f"{' '.join(text)} {question}", answer, things[chosen])
