"""`--set NAME=VALUE`: settings of an engine by name, parsed by their declared types.

Invariant: each name is a listed name, and is given once. Cost: none.
"""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["set_values", "types_of"]

_MOST_DIGITS = 40
_FLAGS = {"true": True, "false": False}


def types_of(names: Iterable[str], *kinds: type) -> dict[str, Any]:
    """Return the declared type of each name, from the first class with this name.

    A name without a class, for example the format of a tier, is a text.
    """
    hints: dict[str, Any] = {}
    for kind in reversed(kinds):
        hints |= get_type_hints(kind)
    return {name: hints.get(name, str) for name in names}


def set_values(stated: Sequence[str], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of arguments `NAME=VALUE`.

    Args:
        stated: the arguments.
        types: the type of each allowed name.

    Raises:
        ConfigError: no `NAME=VALUE`, an unknown or repeated name, or a value of another type.
    """
    found: dict[str, Any] = {}
    for one in stated:
        name, equals, text = one.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set takes NAME=VALUE, not {shown(one)}")
        if name not in types:
            raise ConfigError(f"--set has no {shown(name)}: {', '.join(types)}")
        if name in found:
            raise ConfigError(f"--set {name} is given twice")
        found[name] = _value(name, text, types[name])
    return found


def _value(name: str, text: str, declared: Any) -> Any:  # noqa: ANN401 - a type, and its value
    kinds = get_args(declared) if get_origin(declared) is not Literal else ()
    kinds = [kind for kind in kinds or (declared,) if kind is not NoneType]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if words and text in words:
        return text
    if bool in kinds and text in _FLAGS:
        return _FLAGS[text]
    for kind in (int, float):
        if kind in kinds and len(text) < _MOST_DIGITS:
            try:
                return kind(text)
            except ValueError:
                continue
    if str in kinds:
        return text
    wanted = words or [*(_FLAGS if bool in kinds else ()), *(["a number"] * (bool not in kinds))]
    raise ConfigError(f"--set {name} is {shown(text)}, {' or '.join(wanted)} wanted")
