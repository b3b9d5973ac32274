"""Input files: reading a whole small file named by a user.

Invariant: an unreadable or invalid file raises a `ConfigError` with its name, whatever the path and
the content. Cost: the file is held as a text.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import os

__all__ = ["json_of", "read_text", "toml_of"]


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Return the text of a file in UTF-8.

    Args:
        path: the file.
        what: its noun for messages, as "the settings".

    Raises:
        ConfigError: the file is unreadable, or not in UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError, MemoryError) as error:  # a path with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {what} {path}: {reason}") from error


def json_of(text: str | bytes, what: str) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON document.

    Args:
        text: the document.
        what: what it should be, for messages, as "report.json is no report".

    Raises:
        ConfigError: invalid JSON, too deep nesting, or a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: {error}") from error


def toml_of(text: str, what: str) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Args:
        text: the document.
        what: as for `json_of`.

    Raises:
        ConfigError: invalid TOML, too deep nesting, or a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: {error}") from error
