"""Progress: a bar on the terminal during a long iteration.

Invariant: nothing is drawn without a terminal or without rich. Standard output is left to the
command. Cost: a few redraws per second.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from kvtrie.printable import printable
from kvtrie.sim.readers.compressed import compressed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

__all__ = ["counting", "lines_in", "watched"]

_CHUNK = 1 << 20
_Item = TypeVar("_Item")


def watched(
    items: Iterable[_Item], what: str, *, quiet: bool = False, total: float | None = None
) -> Iterable[_Item]:
    """Return the items, with a bar and the time left during their iteration.

    Args:
        items: the items.
        what: the text before the bar.
        quiet: draw no bar.
        total: approximate number of items without a length.
    """
    if quiet or not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import track
    except ImportError:
        return items
    shown, console = escape(printable(what)), Console(stderr=True)
    return track(items, description=shown, total=total, console=console, transient=True)


@contextmanager
def counting(what: str) -> Generator[Callable[[], object]]:
    """Yield a function to call for each finished item, for an unknown number of items.

    Args:
        what: the text before the count.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda: None
        return
    columns = (SpinnerColumn(), TextColumn(what + " {task.completed:.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda: bar.advance(task)


def lines_in(path: Path) -> int | None:
    """Count the lines of a file by reading it once.

    None for a compressed file, and without a terminal.
    """
    if not sys.stderr.isatty():
        return None
    try:
        with path.open("rb") as file:
            if compressed(file.peek(4)):
                return None
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except OSError:
        return None
