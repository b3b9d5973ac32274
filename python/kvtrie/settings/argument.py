"""Arguments: the checks of given values, common to all settings.

Invariant: results are plain (an int, a float, a str, a tuple), even for values of numpy or torch.
Any invalid value raises a `ConfigError` with the setting's name and the value. Cost: a comparison
or two. A sequence is read only up to its allowed length.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
import reprlib
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = [
    "check_url",
    "few",
    "flag",
    "folder",
    "instance",
    "pairs",
    "put",
    "real",
    "salt",
    "shown",
    "text",
    "url",
    "whole",
    "word",
]

MOST_NAME = 2**16 - 1
"""Most bytes of a name, a salt or a digest."""

_PAIR = 2
_SHORT_BITS = 300
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_USER = re.compile(r"(?<=[/:])([^/:@]*)(:[^@]*)?@")
_Kind = TypeVar("_Kind")


class _Short(reprlib.Repr):
    """Writes values briefly, without Python's full text of a long value."""

    def repr_bytes(self, given: bytes, level: int) -> str:
        del level
        shown = repr(given[: self.maxstring])
        return shown if len(given) <= self.maxstring else f"{shown[:-1]}...' ({len(given)} bytes)"

    def repr_int(self, x: int, level: int) -> str:
        del level
        size = x.bit_length()
        return str(x) if size <= _SHORT_BITS else f"an integer of {size} bits"

    def repr_ndarray(self, given: Any, level: int) -> str:  # noqa: ANN401 - numpy is not imported
        del level
        return f"an array of {given.dtype}{list(given.shape)}"


_SHORT = _Short()


def shown(given: object) -> str:
    """Return any value as a short text for messages."""
    try:
        return _SHORT.repr(given)
    except Exception:  # noqa: BLE001 - a message also names a value without a repr
        return f"a {type(given).__name__}"


def whole(name: str, given: object, low: int, high: int) -> int:
    """Return an integer `low` to `high`. A whole float (`8e9`) is accepted.

    Raises:
        ConfigError: a number out of range or not whole, a bool, or no number.
    """
    found = None
    if isinstance(given, numbers.Real) and not isinstance(given, numbers.Integral):
        with suppress(OverflowError):  # a fraction above all floats
            number = float(given)
            found = int(number) if number.is_integer() else None
    elif not isinstance(given, bool):
        try:
            found = operator.index(given)  # pyright: ignore[reportArgumentType]
        except TypeError:
            found = None
    if found is None:
        raise ConfigError(f"{name} is {shown(given)}, a whole number {low} to {high} wanted")
    if not low <= found <= high:
        raise ConfigError(f"{name} is {shown(found)}, {low} to {high} wanted")
    return found


def real(name: str, given: object, low: float, high: float, *, open_end: bool = False) -> float:
    """Return a finite number `low` to `high`, or below `high` with `open_end`.

    Raises:
        ConfigError: a number out of range or not finite, a bool, or no number.
    """
    number = math.nan
    if isinstance(given, (numbers.Real, float)) and given is not True and given is not False:
        try:
            number = float(given)
        except OverflowError:
            number = math.inf
    if not (math.isfinite(number) and low <= number <= high and not (open_end and number == high)):
        below = "below " if open_end else ""
        wanted = f"{low} to {below}{high} wanted"
        if high == math.inf:
            wanted = f"finite and at least {low} wanted"
        raise ConfigError(f"{name} is {shown(given)}, {wanted}")
    return number


def text(name: str, given: object) -> str:
    """Return a str with a UTF-8 encoding.

    Raises:
        ConfigError: no str, lone surrogates, or more than 65 535 bytes.
    """
    if not isinstance(given, str):
        raise ConfigError(f"{name} is {shown(given)}, a str wanted")
    try:
        size = len(given.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {given[:99]!a}: {error.reason}") from error
    if size > MOST_NAME:
        raise ConfigError(f"{name} has {size} bytes, at most {MOST_NAME} wanted")
    return given


def salt(name: str, given: object) -> bytes:
    """Return the bytes of a tenant's or adapter's salt.

    Raises:
        ConfigError: no bytes, or more than 65 535.
    """
    if not isinstance(given, (bytes, bytearray)):
        raise ConfigError(f"{name} is {shown(given)}, bytes wanted")
    if len(given) > MOST_NAME:
        raise ConfigError(f"{name} has {len(given)} bytes, at most {MOST_NAME} wanted")
    return bytes(given)


def word(name: str, given: object, allowed: Collection[str]) -> str:
    """Return an allowed word.

    Raises:
        ConfigError: any other value.
    """
    if not (isinstance(given, str) and given in allowed):
        raise ConfigError(f"{name} is one of {', '.join(allowed)}, not {shown(given)}")
    return given


def flag(name: str, given: object) -> bool:
    """Return True or False, from a bool of Python or numpy.

    Raises:
        ConfigError: anything else.
    """
    plain: Any = given
    if getattr(plain, "shape", None) == ():
        plain = plain.item()
    if not isinstance(plain, bool):
        raise ConfigError(f"{name} is {shown(given)}, True or False wanted")
    return plain


def folder(name: str, given: object) -> str:
    """Return a valid path, with `~` and `file://` expanded.

    Raises:
        ConfigError: no path, or a path without an encoding, another scheme, a variable, an unknown
            user's home.
    """
    try:
        path: Any = given
        found = os.fsdecode(os.fsencode(path))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is {shown(given)!a}, a path wanted: {error}") from error
    if "\0" in found:
        raise ConfigError(f"{name} is {shown(given)}, a path wanted")
    if scheme := _SCHEME.match(found):
        found = _local(name, found, scheme[1])
    elif "$" in found:
        raise ConfigError(f"{name} is {shown(given)}: variables are not expanded, write the value")
    elif found.startswith("~"):
        found = os.path.expanduser(found)  # noqa: PTH111 - keeps the str, whatever its encoding
        if found.startswith("~"):
            raise ConfigError(
                f"{name} is {shown(given)}: there is no such user; write './~' for a file"
            )
    if not found or "\0" in found:
        raise ConfigError(f"{name} is {shown(given)}, a path wanted")
    return found


def _local(name: str, url: str, scheme: str) -> str:
    """Return the path of a `file` URL."""
    from urllib.parse import unquote_to_bytes, urlsplit

    if scheme.lower() != "file":
        raise ConfigError(
            f"{name} is {shown(url)}: {scheme}:// is not supported, a path or file:// wanted"
        )
    check_url(name, url, "?")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{name} is {shown(url)}: {error}") from error
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{name} is {shown(url)}, file:///path wanted, on this machine")
    return os.fsdecode(unquote_to_bytes(parts.path))


class Url(str):
    """A URL with its password hidden in `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(masked(self))


def masked(url: str) -> str:
    """Return a URL with its password replaced, for messages."""
    head, at, tail = url.rpartition("@")
    return _USER.sub(r"\1:***@", f"{head}{at}") + tail if at else str(url)


def check_url(name: str, url: str, parts: str = "") -> None:
    """Refuse characters outside a URL's path that a parser would drop silently.

    Args:
        name: the setting, for messages.
        url: the URL.
        parts: further characters, separators of parts not allowed in this URL.

    Raises:
        ConfigError: `#`, a control character, a character of `parts`, or a `%` without an escape.
    """
    found = re.search(rf"[\x00-\x1f\x7f#{parts}]|%(?![0-9A-Fa-f]{{2}})", url)
    if found is not None:
        one = found[0]
        raise ConfigError(
            f"{name} is {shown(masked(url))}: {one!r} is no part of an address or of a path on "
            f"this machine, write %{ord(one):02X} for the character"
        )


def url(name: str, given: object) -> Url:
    """Return a text with a scheme.

    Raises:
        ConfigError: no text, no scheme, or as `check_url`.
    """
    found = text(name, given)
    if _URL.match(found) is None:
        found = masked(found)
        raise ConfigError(f"{name} is {found!r}, a URL wanted: 'folder:{found}' is a folder")
    check_url(name, found)
    return Url(found)


def few(name: str, given: object, most: int) -> tuple[Any, ...]:
    """Return the items of a sequence of at most `most` items, reading no more than `most + 1`.

    Raises:
        ConfigError: no sequence, or too many items.
    """
    try:
        items: Iterable[Any] = given  # pyright: ignore[reportAssignmentType]
        found = tuple(islice(items, most + 1))
    except TypeError as error:
        raise ConfigError(f"{name} is {shown(given)}, a sequence wanted") from error
    if len(found) > most:
        raise ConfigError(f"{name} has more than {most} items")
    return found


def pairs(name: str, given: object, most: int) -> tuple[tuple[Any, Any], ...]:
    """Return the items of a sequence of at most `most` pairs.

    Raises:
        ConfigError: no sequence, too many items, or an item that is no pair.
    """
    found = [few(f"a pair in {name}", pair, _PAIR) for pair in few(name, given, most)]
    if any(len(pair) != _PAIR for pair in found):
        raise ConfigError(f"{name} is a sequence of pairs, not {shown(given)}")
    return tuple((first, second) for first, second in found)


def instance(name: str, given: object, kind: type[_Kind]) -> _Kind:
    """Return a value of a class.

    Raises:
        ConfigError: a value of another class.
    """
    if not isinstance(given, kind):
        raise ConfigError(f"{name} is {shown(given)}, a {kind.__name__} wanted")
    return given


def put(setting: object, **read: object) -> None:
    """Puts checked values into a frozen dataclass during its construction."""
    for name, value in read.items():
        object.__setattr__(setting, name, value)
