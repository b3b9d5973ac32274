"""LongBenchV2: questions with four choices over long documents.

Invariant: the answer is A, B, C or D. Cost: a download of about half a gigabyte the first
time, unless a file is given.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (datasets leaves parts untyped)

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import folder
from kvtrie.train.data.module import DataModule, Example

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LongBenchV2"]

_NAME = "zai-org/LongBench-v2"
_CHOICES = ("A", "B", "C", "D")
_KEYS = ("context", "question", *(f"choice_{each}" for each in _CHOICES), "answer")


class LongBenchV2(DataModule):
    """Cases of LongBench v2, from the Hugging Face Hub or from a file of the same JSON.

    Args:
        path: a file with a list of its objects. None downloads them through `datasets`.
        **more: see `DataModule`.
    """

    labels: ClassVar[tuple[str, ...]] = tuple(f" {each}" for each in _CHOICES)

    def __init__(self, *, path: str | None = None, **more: Any) -> None:  # noqa: ANN401 - DataModule's
        super().__init__(**more)
        self.path = None if path is None else Path(folder("path", path))

    def examples(self) -> Sequence[Example]:
        """Return all cases.

        Raises:
            ConfigError: the file or a case cannot be read, or the download fails.
        """
        return [self._read(at, given) for at, given in enumerate(self._objects())]

    def _objects(self) -> Sequence[Any]:
        if self.path is not None:
            try:
                found = json.loads(self.path.read_text(encoding="utf-8-sig"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"cannot read {self.path}: {error}") from error
            if not isinstance(found, list):
                raise ConfigError(f"{self.path} holds no list of cases")
            return found
        try:
            from datasets import load_dataset  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise ConfigError(
                "datasets is not installed; LongBenchV2 needs: pip install 'kvtrie[train]'"
            ) from error
        try:
            return list(load_dataset(_NAME, split="train"))
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ConfigError(f"cannot fetch {_NAME}: {first}; --data.path reads a file") from error

    def _read(self, at: int, given: Any) -> Example:  # noqa: ANN401 - from JSON
        try:
            context, question, *choices, answer = (str(given[key]).strip() for key in _KEYS)
            label = _CHOICES.index(answer)
            "".join((context, question, *choices)).encode("utf-8")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"LongBenchV2, case {at}: {error!r}") from error
        listed = "\n".join(f"({name}) {each}" for name, each in zip(_CHOICES, choices, strict=True))
        prompt = f"{context}\n\nQuestion: {question}\n{listed}\nThe letter of the answer is:"
        return Example(prompt, self.labels[label], label)
