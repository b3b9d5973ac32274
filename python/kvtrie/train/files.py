"""Files: atomic writes of files and folders.

Invariant: a name always refers to a complete file or folder. A crash leaves partial content only
under temporary names. Cost: a durable write to a temporary name, and a rename.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.output import write_output

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

__all__ = ["whole_folder", "write_whole"]

_PART = ".part"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, creating its folder if necessary.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    write_output(path, content, durable=True)


@contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """Yield a temporary folder and rename it to `path` at the end, replacing an existing folder.

    Raises:
        ConfigError: the folder cannot be written.
    """
    part = path.with_name(path.name + _PART)
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for each in part.rglob("*"):
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
