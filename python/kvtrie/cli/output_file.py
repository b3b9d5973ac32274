"""Output files as arguments: a path that cannot be written to is refused before the work begins."""

from __future__ import annotations

from pathlib import Path

from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.output import check_output

__all__ = ["output_file"]


def output_file(text: str) -> Path:
    """The path of an option that names a file to write.

    Raises:
        KvtrieError: a folder, a socket or a block device; no folder for a new file.
    """
    path = Path(text)
    try:
        check_output(path)
    except ConfigError as error:
        # A `ConfigError` is a `ValueError`, which argparse reports in its own words.
        raise KvtrieError(str(error)) from error
    return path
