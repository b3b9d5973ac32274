"""Text from outside, escaped for terminals and logs.

Names of sessions, requests, adapters and models come from clients, and texts from files and
servers. Invariant: the result is one line of visible characters and spaces, of bounded length.
Cost: a pass over the kept text.
"""

from __future__ import annotations

__all__ = ["MESSAGE", "printable"]

MESSAGE = 2000
"""Characters of a message on its own line."""

_LONGEST = 128  # characters of a name on a line with further text


def printable(text: object, most: int = _LONGEST, *, in_ascii: bool = False) -> str:
    """Return a text in one line, escaped as in a Python literal.

    Control characters, line ends, marks of direction and lone surrogates are escaped. Letters of
    any script stay.

    Args:
        text: the text, or any object with a text.
        most: maximum number of characters.
        in_ascii: also escape letters outside ASCII, for a log file restricted to ASCII.
    """
    whole = str(text)
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in whole[:most])
    if in_ascii:
        shown = shown.encode("ascii", "backslashreplace").decode()
    return shown if len(whole) <= most else f"{shown}... ({len(whole)} characters)"
