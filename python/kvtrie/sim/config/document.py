"""Document: a settings file as TOML, with KEY=VALUE changes.

Invariant: a change names a possible key or list position. Unknown settings are found by their
table. Cost: read once per run.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.input import read_text
from kvtrie.input import toml_of as parsed
from kvtrie.settings.argument import shown

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["change", "put", "read_document", "toml_of", "value_at", "values_of"]

_MOST_DIGITS = 19  # of a place in a list


def read_document(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: an unreadable file.
    """
    return parsed(read_text(path, "the settings"), f"{path} is no TOML")


def change(document: dict[str, Any], stated: str) -> None:
    """Apply a `KEY=VALUE` change to a document.

    Raises:
        ConfigError: not `KEY=VALUE`, or a key below a plain value.
    """
    name, equals, given = stated.partition("=")
    if not (name and equals):
        raise ConfigError(f"--set takes KEY=VALUE, not {stated!r}")
    put(document, name, _value(given), f"--set {stated}")


def values_of(stated: str, option: str) -> tuple[str, list[Any]]:
    """Return the key and the values of `KEY=VALUE,VALUE`, each TOML or a word.

    Raises:
        ConfigError: a missing key or value.
    """
    name, equals, given = stated.partition("=")
    if not (name and equals and given):
        raise ConfigError(f"{option} takes KEY=VALUE,VALUE, not {stated!r}")
    try:
        return name, parsed(f"values = [{given}]", option)["values"]
    except ConfigError:
        return name, [_value(each.strip()) for each in given.split(",")]


def _value(given: str) -> Any:  # noqa: ANN401 - any TOML value
    try:
        return parsed(f"value = {given}", "a value")["value"]
    except ConfigError:
        return given


def put(document: dict[str, Any], name: str, value: object, stated: str) -> None:
    """Set the value of a dotted key in a document. An error begins with `stated`.

    Raises:
        ConfigError: a key below a plain value.
    """
    *above, last = name.split(".")
    node: Any = document
    for key in above:
        parent, place = _place(node, key, stated)
        node = parent.setdefault(key, {}) if isinstance(parent, dict) else parent[place]
    parent, place = _place(node, last, stated)
    if isinstance(parent, dict):
        parent[last] = value
    else:
        parent[place] = value


def value_at(document: dict[str, Any], name: str, stated: str) -> Any:  # noqa: ANN401
    """Return the value of a dotted key. An error begins with `stated`.

    Raises:
        ConfigError: a missing key.
    """
    node: Any = document
    for key in name.split("."):
        parent, place = _place(node, key, stated)
        node = parent.get(key) if isinstance(parent, dict) else parent[place]
        if node is None:
            raise ConfigError(f"{stated}: the settings do not have {key}")
    return node


def toml_of(value: object) -> str:
    """Return a value of a document as a line of TOML."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return f"{{{', '.join(f'{key} = {toml_of(each)}' for key, each in pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_of, cast('list[Any]', value)))}]"
    # Strings, numbers and booleans are written like JSON. Settings have no dates.
    return json.dumps(value, ensure_ascii=False)


def _place(
    value: object, key: str, stated: str
) -> tuple[dict[str, Any], int] | tuple[list[Any], int]:
    """Return a table, or a list and the position named by a key."""
    if isinstance(value, dict):
        return cast("dict[str, Any]", value), 0
    if not isinstance(value, list):
        raise ConfigError(f"{stated}: {shown(value)} has no key {key}")
    items = cast("list[Any]", value)
    if not (key.isdecimal() and len(key) < _MOST_DIGITS and int(key) < len(items)):
        raise ConfigError(f"{stated}: {key} is no place in a list of {len(items)}")
    return items, int(key)
