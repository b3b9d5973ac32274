"""Output files as arguments: refuses an unwritable path before the work begins."""

from __future__ import annotations

from pathlib import Path

from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.output import check_output

__all__ = ["output_file"]


def output_file(text: str) -> Path:
    """Return the path of an output file's option.

    Raises:
        KvtrieError: a folder, a socket or a block device, or no folder for a new file.
    """
    path = Path(text)
    try:
        check_output(path)
    except ConfigError as error:
        # A `ConfigError` is a `ValueError`, and argparse would replace its message.
        raise KvtrieError(str(error)) from error
    return path
