"""Progress: a bar on the terminal while something long is gone through.

Invariant: nothing is drawn without a terminal or without rich; standard output stays the
command's. Cost: a few redraws per second.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["watched"]

_Item = TypeVar("_Item")


def watched(items: Sequence[_Item], what: str, *, quiet: bool) -> Iterable[_Item]:
    """The items, with a bar while they are gone through.

    Args:
        items: the items to go through.
        what: the text before the bar.
        quiet: draw none.
    """
    if quiet or not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    return track(items, description=what, console=Console(stderr=True), transient=True)
