"""Text that someone else chose, as terminals and logs may show it.

Names of sessions, requests, adapters and models come from clients, and texts from files and
servers. Invariant: what is returned is one line of visible characters and spaces, of bounded
length. Cost: a pass over the text that is kept.
"""

from __future__ import annotations

__all__ = ["MESSAGE", "printable"]

MESSAGE = 2000
"""Characters of a message that has a line to itself."""

_LONGEST = 128  # characters of a name on a line that has more to show


def printable(text: object, most: int = _LONGEST, *, in_ascii: bool = False) -> str:
    """Return a text in one line, escaped as in a Python literal.

    Control characters, line ends, marks of direction and lone surrogates are escaped; letters of
    any script stay.

    Args:
        text: the text, or anything that has one.
        most: characters of it that are kept.
        in_ascii: escape other letters too, for a log whose file may take ASCII alone.
    """
    whole = str(text)
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in whole[:most])
    if in_ascii:
        shown = shown.encode("ascii", "backslashreplace").decode()
    return shown if len(whole) <= most else f"{shown}... ({len(whole)} characters)"
