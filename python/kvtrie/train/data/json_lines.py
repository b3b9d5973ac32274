"""JsonLines: cases from a file with one JSON object a line.

Invariant: a line that cannot be read is named. Cost: one read of the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.argument import folder
from kvtrie.errors import ConfigError
from kvtrie.train.data.module import DataModule, Example

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["JsonLines"]


class JsonLines(DataModule):
    """Objects with `prompt` and `answer`, with `prompt` and `label`, or with `text` alone.

    Args:
        path: of the file.
        labels: what classes are called, in their order; a `label` is one of them or its place.
        others: as of `DataModule`.
    """

    def __init__(self, *, path: str, labels: list[str] | None = None, **more: Any) -> None:  # noqa: ANN401 - DataModule's
        super().__init__(**more)
        self.path = Path(folder("path", path))
        self.labels = tuple(labels or ())  # pyright: ignore[reportAttributeAccessIssue]

    def examples(self) -> Sequence[Example]:
        """All cases.

        Raises:
            ConfigError: the file or one of its lines cannot be read.
        """
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {self.path}: {error}") from error
        return [self._read(at, line) for at, line in enumerate(lines, 1) if line.strip()]

    def _read(self, at: int, line: str) -> Example:
        try:
            given: dict[str, Any] = json.loads(line)
            prompt = given["text"] if "text" in given else given["prompt"]
            label = given.get("label")
            if isinstance(label, str):
                label = self.labels.index(label)
            answer = given.get("answer", "")
            fits = label is None or 0 <= label < len(self.labels)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.path}, line {at}: {error}") from error
        if not (isinstance(prompt, str) and isinstance(answer, str)):
            raise ConfigError(f"{self.path}, line {at}: prompt and answer are text")
        if not fits:
            raise ConfigError(
                f"{self.path}, line {at}: label {label}, and there are {len(self.labels)}"
            )
        return Example(prompt, answer, label)
