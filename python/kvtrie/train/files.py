"""Files that are there whole or not at all.

Invariant: a name is only ever that of a whole file or folder; what a crash leaves has other names.
Cost: one write to a neighbouring name, made durable, and a rename.
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
    """Write a file, in a folder that is made where it is not there.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    write_output(path, content, durable=True)


@contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """A folder to write into that takes its name when all is written; one of that name goes.

    Raises:
        ConfigError: it cannot be written.
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
