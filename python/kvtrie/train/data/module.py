"""DataModule: a data set, split into training, validation and test, by token lengths.

Invariant: a case is in one split only; lengths that were once found are reused whatever
`max_seq_length` is. Cost: each case is tokenised when it is first used, or for its length.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvtrie.argument import flag, folder, real, whole, word
from kvtrie.errors import ConfigError
from kvtrie.train.data.batches import Case
from kvtrie.train.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DataModule", "Example", "Split"]

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Example:
    """A case as text.

    Attributes:
        prompt: what is read.
        answer: what is to be said behind it; "" where the next token of all text is the target.
        label: the class, a place in the module's `labels`; None where there are no classes.
    """

    prompt: str
    answer: str = ""
    label: int | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Cases by their places in the module, with their lengths in tokens."""

    places: tuple[int, ...]
    lengths: tuple[int, ...]


class DataModule(ABC):
    """A data set; any subclass that was imported is found by its name.

    Args:
        max_seq_length: keep cases of at most so many tokens, then split; None keeps all.
        metadata_dir: a folder in which token lengths are stored and found again.
        val_split_fraction: share of the kept cases that are for validation.
        trainloader_longest_first: let the first batch hold the longest cases, so that memory that
            does not suffice shows at once.
        test_set_tag: "rest" makes a test set of the cases longer than `max_seq_length`, the
            shortest first.
        seed: of the split.

    Raises:
        ConfigError: a number that cannot be.
    """

    labels: ClassVar[tuple[str, ...]] = ()
    """What classes are called, where there are any."""

    def __init__(
        self,
        *,
        max_seq_length: int | None = None,
        metadata_dir: str | None = None,
        val_split_fraction: float = 0.1,
        trainloader_longest_first: bool = False,
        test_set_tag: str | None = None,
        seed: int = 0,
    ) -> None:
        if max_seq_length is not None:
            max_seq_length = whole("max_seq_length", max_seq_length, 1, _MOST)
        self.max_seq_length = max_seq_length
        self.metadata_dir = None if metadata_dir is None else folder("metadata_dir", metadata_dir)
        self.val_split_fraction = real(
            "val_split_fraction", val_split_fraction, 0.0, 1.0, open_end=True
        )
        self.longest_first = flag("trainloader_longest_first", trainloader_longest_first)
        self.test_set_tag = (
            None if test_set_tag is None else word("test_set_tag", test_set_tag, {"rest"})
        )
        if self.test_set_tag and max_seq_length is None:
            raise ConfigError("test_set_tag 'rest' needs a max_seq_length that cases are above")
        self.seed = whole("seed", seed, 0, _MOST)
        self._tokens: Callable[[str], list[int]] = lambda _: []
        self._classes = False
        self._examples: Sequence[Example] = ()
        self._cases: dict[int, Case] = {}
        self.train, self.validation, self.test = (Split((), ()) for _ in range(3))

    @abstractmethod
    def examples(self) -> Sequence[Example]:
        """All cases.

        Raises:
            ConfigError: they cannot be read.
        """

    def prepare(
        self, tokens: Callable[[str], list[int]], *, classes: bool = False, name: str = ""
    ) -> None:
        """Read, measure and split.

        Args:
            tokens: of text.
            classes: whether targets are classes, instead of next tokens.
            name: of what makes the tokens, which lengths are stored under.

        Raises:
            ConfigError: no cases, or none that are short enough.
        """
        self._tokens, self._classes = tokens, classes
        self._examples = self.examples()
        if not self._examples:
            raise ConfigError(f"{type(self).__name__} has no cases")
        if classes and any(each.label is None for each in self._examples):
            raise ConfigError(f"{type(self).__name__} has cases without a class")
        lengths = self._lengths(name)
        most = _MOST if self.max_seq_length is None else self.max_seq_length
        kept = [at for at, length in enumerate(lengths) if length <= most]
        if not kept:
            raise ConfigError(
                f"all {len(lengths)} cases are longer than max_seq_length {most}: the shortest "
                f"has {min(lengths)} tokens"
            )
        random.Random(self.seed).shuffle(kept)  # noqa: S311 - nothing is secret here
        held = int(len(kept) * self.val_split_fraction)
        held = max(held, int(self.val_split_fraction > 0 and len(kept) > 1))

        def split(places: Sequence[int]) -> Split:
            return Split(tuple(places), tuple(lengths[at] for at in places))

        self.validation, self.train = split(kept[:held]), split(kept[held:])
        if self.test_set_tag == "rest":
            rest = [at for at, length in enumerate(lengths) if length > most]
            self.test = split(sorted(rest, key=lambda at: (lengths[at], at)))

    def example(self, place: int) -> Example:
        """A case as text."""
        return self._examples[place]

    def case(self, place: int) -> Case:
        """A case as tokens."""
        if place not in self._cases:
            self._cases[place] = self._made(place)
        return self._cases[place]

    def _made(self, place: int) -> Case:
        example = self._examples[place]
        prompt = self._tokens(example.prompt)
        if self._classes:
            return Case(prompt, [example.label or 0])
        if not example.answer:
            return Case(prompt[:-1], prompt[1:])
        answer = self._tokens(example.answer)
        return Case(prompt + answer[:-1], answer)

    def _lengths(self, name: str) -> list[int]:
        """Tokens of each case, from the metadata where they stand there."""
        if self.metadata_dir is None:
            return [len(self.case(at).input_ids) for at in range(len(self._examples))]
        digest = hashlib.sha256(f"{name} {self._classes}".encode())
        for each in self._examples:
            digest.update(f"\0{each.prompt}\0{each.answer}".encode())
        stamp = digest.hexdigest()
        path = Path(self.metadata_dir) / f"{type(self).__name__}-{stamp[:16]}.json"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["digest"] == stamp and len(stored["lengths"]) == len(self._examples):
                return [int(length) for length in stored["lengths"]]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or not whole: measure again
        lengths = [len(self.case(at).input_ids) for at in range(len(self._examples))]
        text = json.dumps({"digest": stamp, "lengths": lengths})
        write_whole(path, text.encode())
        return lengths
