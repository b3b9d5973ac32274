"""JSON answers of services, read field by field.

Invariant: an unexpected value raises a `ValueError` with the value. Cost: a comparison per value.
"""

from __future__ import annotations

from typing import Any, cast

from kvtrie.settings.argument import shown

__all__ = ["anything", "entries", "field", "items", "natural"]

_MOST = 2**64 - 1


def field(given: object, name: str) -> Any:  # noqa: ANN401 - JSON
    """Return the field of an object.

    Raises:
        ValueError: no object, or an object without the field.
    """
    if isinstance(given, dict) and name in given:
        return cast("dict[str, Any]", given)[name]
    raise ValueError(f"{shown(cast('object', given))} has no field {name}")


def items(given: object) -> list[Any]:
    """Return the items of a list.

    Raises:
        ValueError: no list.
    """
    if isinstance(given, list):
        return cast("list[Any]", given)
    raise ValueError(f"{shown(given)} is no list")


def entries(given: object) -> list[tuple[int, Any]]:
    """Return the fields of an object with numbers as names.

    Raises:
        ValueError: no object, or a name that is no number.
    """
    if isinstance(given, dict):
        pairs = cast("dict[str, Any]", given).items()
        for name, _ in pairs:
            if not (name.isascii() and name.isdigit() and len(name) <= len(str(_MOST))):
                raise ValueError(f"{shown(name)} is no number")
        return [(int(name), value) for name, value in pairs]
    raise ValueError(f"{shown(given)} is no object")


def natural(given: object, most: int = _MOST) -> int:
    """Return an integer 0 to `most`.

    Raises:
        ValueError: an invalid value.
    """
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= most:
        raise ValueError(f"{shown(given)} is no integer 0 to {most}")
    return given


def anything(answer: object) -> None:
    """Read an answer without a needed value: the call was carried out."""
    del answer
