"""DataModule: a data set, split into training, validation and test, by token lengths.

Invariant: no case is in two splits. Stored lengths are reused for any `max_seq_length`. Cost: each
case is tokenised on first use, or for its length.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import flag, folder, real, whole, word
from kvtrie.train.data.batches import Case
from kvtrie.train.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

__all__ = ["DataModule", "Example", "Split"]

log = logging.getLogger(__name__)

_MOST = 2**31 - 1
_TAIL = 64  # last characters of a prompt with an effect on the tokens of the next text


@dataclass(frozen=True, slots=True)
class Example:
    """A case as text.

    Attributes:
        prompt: the prompt.
        answer: the text after it, "" if every next token of the prompt is a target.
        label: the class, an index into the module's `labels`. None without classes.
        messages: a chat ending with the answer, each message with `role` and `content`. It replaces
            `prompt` and `answer`.
    """

    prompt: str
    answer: str = ""
    label: int | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of cases in the module, with their lengths in tokens."""

    places: tuple[int, ...]
    lengths: tuple[int, ...]


class _Noted:
    """Records the arguments of an object, so that a later process can create an equal object.

    This is a separate base class, because `inspect.signature` and jsonargparse prefer a class's own
    `__new__` to its `__init__` for the arguments.
    """

    given: Mapping[str, Any]
    """The arguments by name."""

    def __new__(cls, *given: Any, **named: Any) -> Self:  # noqa: ANN401 - of any subclass
        """Record the arguments."""
        made = super().__new__(cls)
        made.given = dict(zip(inspect.signature(cls).parameters, given, strict=False)) | named
        return made


class DataModule(_Noted, ABC):
    """A data set. Imported subclasses are available by name.

    Args:
        max_seq_length: keep cases of at most this number of tokens before the split. None keeps
            all.
        metadata_dir: a folder for stored token lengths.
        val_split_fraction: share of the kept cases for validation.
        trainloader_longest_first: put the longest cases into the first batch, so a lack of memory
            shows at once.
        test_set_tag: "rest" makes a test set of the cases longer than `max_seq_length`, the
            shortest first.
        seed: seed of the split.

    Raises:
        ConfigError: a number out of range.
    """

    labels: ClassVar[tuple[str, ...]] = ()
    """Names of the classes, if there are any."""

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
        self._continued = self._tokens
        self._chat: Callable[[Any, bool], list[int]] | None = None
        self._classes = False
        self._examples: Sequence[Example] = ()
        self._cases: dict[int, Case] = {}
        self.train, self.validation, self.test = (Split((), ()) for _ in range(3))

    @abstractmethod
    def examples(self) -> Sequence[Example]:
        """Return all cases.

        Raises:
            ConfigError: the cases cannot be read.
        """

    def where(self, place: int) -> str:
        """Return the name of a case for messages."""
        return f"{type(self).__name__}, case {place}"

    def prepare(
        self,
        tokens: Callable[[str], list[int]],
        *,
        continued: Callable[[str], list[int]] | None = None,
        chat: Callable[[Any, bool], list[int]] | None = None,
        classes: bool = False,
        name: str = "",
    ) -> None:
        """Read, measure and split the cases. Skip cases without a target, with a single warning.

        Args:
            tokens: tokenizer of a prompt, as for inference.
            continued: tokenizer without special tokens, for the tokens of an answer after the
                prompt. None takes `tokens`.
            chat: tokenizer of messages, with the opening of an answer if the flag is set. None
                without a chat template.
            classes: whether targets are classes instead of next tokens.
            name: name of the tokenizer, part of the key of stored lengths.

        Raises:
            ConfigError: no cases, no case with a target, or no case short enough.
        """
        self._tokens, self._classes, self._chat = tokens, classes, chat
        self._continued = tokens if continued is None else continued
        self._examples = self.examples()
        if not self._examples:
            raise ConfigError(f"{type(self).__name__} has no cases")
        for at, each in enumerate(self._examples):
            if classes and each.label is None:
                raise ConfigError(
                    f"{type(self).__name__} has cases without a class, the first is "
                    f"{self.where(at)}"
                )
            if each.messages is not None and chat is None:
                raise ConfigError(
                    f"{self.where(at)}: messages take a tokenizer with a chat template, and this "
                    "one has none: give prompt and answer"
                )
        lengths = self._lengths(name)
        if empty := [at for at, length in enumerate(lengths) if not length]:
            self._leave_out(empty, len(lengths))
        most = _MOST if self.max_seq_length is None else self.max_seq_length
        fitting = [at for at, length in enumerate(lengths) if 0 < length <= most]
        if not fitting:
            raise ConfigError(
                f"all {len(lengths) - len(empty)} cases are longer than max_seq_length {most}: the "
                f"shortest has {min(filter(None, lengths))} tokens"
            )
        random.Random(self.seed).shuffle(fitting)  # noqa: S311 - not used for secrets
        validating = int(len(fitting) * self.val_split_fraction)
        validating = max(validating, int(self.val_split_fraction > 0 and len(fitting) > 1))

        def split(places: Sequence[int]) -> Split:
            return Split(tuple(places), tuple(lengths[at] for at in places))

        self.validation, self.train = split(fitting[:validating]), split(fitting[validating:])
        if self.test_set_tag == "rest":
            rest = [at for at, length in enumerate(lengths) if length > most]
            self.test = split(sorted(rest, key=lambda at: (lengths[at], at)))

    def _leave_out(self, empty: Sequence[int], total: int) -> None:
        counted = (
            f"{len(empty)} of {total} cases have no target, or no token before it; the first is "
            f"{self.where(empty[0])}"
        )
        if len(empty) == total:
            raise ConfigError(counted)
        log.warning("%s: they are left out", counted)

    def label_tokens(self) -> list[list[int]]:
        """Return the tokens of each label after the first prompt. Call `prepare` first."""
        return [self._after(self._examples[0].prompt, each) for each in self.labels]

    def _after(self, prompt: str, text: str) -> list[int]:
        """Return the tokens added by a text to a prompt.

        A tokenizer with word marks puts a mark before the first word of any text, so a separately
        encoded text would begin with an extra mark.
        """
        tail = prompt[-_TAIL:]
        tail = tail[tail.find(" ") + 1 :]
        before, both = self._continued(tail), self._continued(tail + text)
        if both[: len(before)] == before and len(both) > len(before):
            return both[len(before) :]
        return self._continued(text)  # a token spans the border

    def example(self, place: int) -> Example:
        """Return a case as text."""
        return self._examples[place]

    def prompt(self, place: int) -> list[int]:
        """Return the tokens of a case up to its answer."""
        case = self.case(place)
        return case.input_ids if self._classes else case.input_ids[: 1 - len(case.targets) or None]

    def case(self, place: int) -> Case:
        """Return a case as tokens."""
        if place not in self._cases:
            self._cases[place] = self._made(place)
        return self._cases[place]

    def _made(self, place: int) -> Case:
        example = self._examples[place]
        if example.messages is not None and self._chat is not None:
            prompt, answer = self._of_chat(place, example.messages)
        else:
            prompt, answer = self._tokens(example.prompt), []
            if example.answer:
                answer = self._after(example.prompt, example.answer)
        if self._classes:
            return Case(prompt, [example.label or 0])
        if not answer:
            return Case(prompt[:-1], prompt[1:])
        return Case(prompt + answer[:-1], answer)

    def _of_chat(
        self, place: int, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[int]]:
        """Return the tokens before the last message, and the tokens of the answer with its end."""
        chat = self._chat
        assert chat is not None  # noqa: S101 - `prepare` refuses the case otherwise
        try:
            prompt, whole = chat(messages[:-1], True), chat(messages, False)  # noqa: FBT003
        except Exception as error:  # a template may raise any exception
            raise ConfigError(f"{self.where(place)}: the chat template fails: {error}") from error
        if whole[: len(prompt)] != prompt:
            raise ConfigError(
                f"{self.where(place)}: the chat template writes other text before the answer than "
                "when it asks for one: give prompt and answer"
            )
        return prompt, whole[len(prompt) :]

    def _length(self, place: int) -> int:
        """Return the number of tokens of a case, 0 without a target after a token."""
        case = self.case(place)
        fits = self._classes or len(case.targets) <= len(case.input_ids)
        return len(case.input_ids) if case.targets and fits else 0

    def _lengths(self, name: str) -> list[int]:
        """Return the length of each case, from the metadata if stored, see `_length`."""
        if self.metadata_dir is None:
            return [self._length(at) for at in range(len(self._examples))]
        digest = hashlib.sha256(f"3 {name} {self._classes}".encode())
        for each in self._examples:
            content = (
                json.dumps(each.messages) if each.messages else f"{each.prompt}\0{each.answer}"
            )
            digest.update(f"\0{content}".encode())
        stamp = digest.hexdigest()
        path = Path(self.metadata_dir) / f"{type(self).__name__}-{stamp[:16]}.json"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["digest"] == stamp and len(stored["lengths"]) == len(self._examples):
                return [int(length) for length in stored["lengths"]]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # missing or damaged: measure again
        lengths = [self._length(at) for at in range(len(self._examples))]
        text = json.dumps({"digest": stamp, "lengths": lengths})
        write_whole(path, text.encode())
        return lengths
