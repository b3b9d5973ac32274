"""JsonLines: cases from a file with a JSON object per line.

Invariant: an error names the invalid line. Cost: a read of the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import few, folder, text
from kvtrie.train.data.module import DataModule, Example

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["JsonLines"]

_BOM = b"\xef\xbb\xbf"
_MOST_LABELS = 2**20


class JsonLines(DataModule):
    """Objects with `prompt` and `answer`, `prompt` and `label`, `messages`, or only `text`.

    Args:
        path: path of the file.
        labels: names of the classes, in order. A `label` is a name or its index.
        prompt_key: name of the field with the prompt.
        answer_key: name of the field with the answer.
        **more: see `DataModule`.
    """

    def __init__(
        self,
        *,
        path: str,
        labels: list[str] | None = None,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        **more: Any,  # noqa: ANN401 - DataModule's
    ) -> None:
        super().__init__(**more)
        self.path = Path(folder("path", path))
        named = tuple(text("labels", each) for each in few("labels", labels or (), _MOST_LABELS))
        self.labels = named  # pyright: ignore[reportAttributeAccessIssue]
        self._prompt = text("prompt_key", prompt_key)
        self._answer = text("answer_key", answer_key)
        self._lines: list[int] = []

    def examples(self) -> Sequence[Example]:
        """Return all cases.

        Raises:
            ConfigError: the file or a line cannot be read.
        """
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error}") from error
        # Only "\n" ends a line: JSON strings may contain further Unicode line separators.
        lines = raw.removeprefix(_BOM).split(b"\n")
        self._lines = [at for at, line in enumerate(lines, 1) if line.strip()]
        return [self._read(at, lines[at - 1]) for at in self._lines]

    def where(self, place: int) -> str:
        """Return the file and line of a case, for messages."""
        return f"{self.path}, line {self._lines[place]}"

    def _read(self, at: int, line: bytes) -> Example:
        try:
            given = json.loads(line.decode("utf-8"))
            json.dumps(given, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise self._wrong(at, "half of a surrogate pair, which is no character") from error
        except (ValueError, RecursionError) as error:
            raise self._wrong(at, str(error)) from error
        row = _object(given)
        if row is None:
            raise self._wrong(at, f"a {type(given).__name__}, an object is wanted")
        if self._prompt not in row and "messages" in row:
            return Example("", messages=self._messages(at, row["messages"]))
        if self._prompt not in row and "text" in row:
            return Example(self._text(at, row, "text"), label=self._label(at, row))
        label = self._label(at, row)
        missing = [name for name in (self._prompt, self._answer) if name not in row]
        if self._prompt in missing or (missing and label is None):
            raise self._wrong(
                at,
                f"no {' and no '.join(missing)} among {', '.join(map(repr, row)) or 'no fields'}: "
                "a row has prompt and answer (--data.prompt_key and --data.answer_key name "
                "others), prompt and label, messages, or text",
            )
        answer = self._text(at, row, self._answer) if not missing else ""
        prompt = self._text(at, row, self._prompt)
        if not missing and not answer and label is None:
            return Example("")  # no target: the prompt would become the target
        return Example(prompt, answer, label)

    def _text(self, at: int, row: dict[str, Any], name: str) -> str:
        if not isinstance(row[name], str):
            raise self._wrong(at, f"{name} is {json.dumps(row[name])[:40]}, text is wanted")
        return row[name]

    def _label(self, at: int, row: dict[str, Any]) -> int | None:
        label: Any = row.get("label")
        if isinstance(label, str) and label in self.labels:
            return self.labels.index(label)
        if label is None:
            return None
        classes = len(self.labels)
        if isinstance(label, int) and not isinstance(label, bool) and label in range(classes):
            return label
        raise self._wrong(
            at,
            f"label {json.dumps(label)[:40]}, one of {classes} labels or its place from 0 "
            "on is wanted",
        )

    def _messages(self, at: int, given: Any) -> tuple[dict[str, Any], ...]:  # noqa: ANN401
        listed = cast("list[object]", given) if isinstance(given, list) else []
        turns = [row for row in map(_object, listed) if row is not None and _speaks(row)]
        fits = len(turns) == len(listed) > 1
        if not fits or turns[-1]["role"] != "assistant":
            raise self._wrong(
                at,
                "messages are objects with role and content as text, at least one before the "
                "assistant's answer, which comes last",
            )
        return tuple(turns)

    def _wrong(self, at: int, what: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {at}: {what}")


def _object(given: object) -> dict[str, Any] | None:
    """Return a JSON object, or None for any further type."""
    return cast("dict[str, Any]", given) if isinstance(given, dict) else None


def _speaks(message: dict[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
