"""Table: a table of a settings file, read key by key.

Invariant: a value is checked when taken, and an error has the full name of the key. `close` refuses
the remaining keys. Cost: a comparison or two per key.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import flag, real, shown, text, whole, word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Table", "made", "plain"]


class Table:
    """A table of a document, read key by key."""

    def __init__(self, name: str, given: object) -> None:
        if not isinstance(given, dict):
            raise ConfigError(f"{name} is {shown(given)}, a table wanted")
        self._name = name
        self._left = dict(cast("dict[str, Any]", given))
        self._allowed: list[str] = []

    def take(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - any TOML value
        """Return the value of a key, unchecked."""
        self._allowed.append(key)
        return self._left.pop(key, default)

    def key(self, key: str) -> str:
        """Return the full name of a key, including the outer tables."""
        return f"{self._name}.{key}" if self._name else key

    def number(self, key: str, default: int, low: int, high: int) -> int:
        """Return a whole number `low` to `high`."""
        return whole(self.key(key), self.take(key, default), low, high)

    def real(self, key: str, default: float, low: float, high: float) -> float:
        """Return a number `low` to `high`."""
        return real(self.key(key), self.take(key, default), low, high)

    def word(self, key: str, allowed: tuple[str, ...]) -> str:
        """Return a word among the allowed words. The first is the default."""
        return word(self.key(key), self.take(key, allowed[0]), allowed)

    def flag(self, key: str, default: bool) -> bool:  # noqa: FBT001 - as `number`
        """Return a boolean."""
        return flag(self.key(key), self.take(key, default))

    def text(self, key: str, default: str) -> str:
        """Return a str."""
        return text(self.key(key), self.take(key, default))

    def table(self, key: str) -> Table:
        """Return a nested table, empty if not given."""
        return Table(self.key(key), self.take(key, {}))

    def some(self, *keys: str) -> dict[str, Any]:
        """Return the given keys among some keys, with their values."""
        present = {key: self._left[key] for key in keys if key in self._left}
        for key in keys:
            self.take(key)
        return present

    def close(self) -> None:
        """Refuse the remaining keys."""
        for key, value in self._left.items():
            raise ConfigError(
                f"{self.key(key)} is {shown(value)}, but there is no such key: "
                f"{', '.join(sorted(self._allowed))}"
            )


def made(name: str, make: Callable[..., Any], given: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return an object of a settings class, with its arguments given by name."""
    try:
        return make(**given)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{name} lacks a key: {error}") from error


def plain(kind: type[Any], *but: str) -> tuple[str, ...]:
    """Return the argument names of a settings class allowed as keys of a table."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in but)
