"""Services by name: built-in services, and further services by entry point.

Invariant: an unknown name is refused with the known names. Cost: importing the service in use.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["opened"]

_Kind = TypeVar("_Kind")


def opened(
    group: str,
    kind: str,
    own: Mapping[str, str],
    wanted: type[_Kind],
    *arguments: object,
    **options: Any,  # noqa: ANN401 - the back end's own
) -> _Kind:
    """Make an object of the class registered under a name.

    Args:
        group: the group of entry points.
        kind: the name.
        own: classes of this package by name, as "module:class".
        wanted: the protocol required of the object.
        arguments: positional arguments of the class.
        options: further arguments of the class.

    Raises:
        ConfigError: an unknown name or option, or an object without the protocol.
    """
    name = text("kind", kind)
    others = {entry.name: entry for entry in entry_points(group=group)}
    found = others | {one: EntryPoint(one, at, group) for one, at in own.items()}
    if name not in found:
        raise ConfigError(f"kind is {name!r}, one of {', '.join(sorted(found))} wanted")
    try:
        made: object = found[name].load()(*arguments, **options)
    except (ImportError, TypeError) as error:
        raise ConfigError(f"{group} {name}: {error}") from error
    if not isinstance(made, wanted):
        raise ConfigError(f"{group} {name}: is no {wanted.__name__}")
    return made
