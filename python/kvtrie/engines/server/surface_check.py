"""Warns of untested engine versions, with the names and signatures they changed.

Invariant: a tested version costs only a comparison. Cost of an untested version: an import of all
modules listed by the engine's `surface`, once per process.
"""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import Any, Protocol

from kvtrie.engines.server.signatures import refused_calls, refused_overrides
from kvtrie.errors import ConfigError

__all__ = ["Surface", "load_class", "members", "missing_names", "refused_signatures", "warn"]

_WARNED: set[tuple[str, str]] = set()


class Surface(Protocol):
    """The parts of an engine used by kvtrie: a module with these names.

    Attributes:
        ENGINE: the engine's name.
        LOG: name of a logger shown by the engine.
        VERSIONS: the tested versions, the oldest first, each as "0.32".
        USED: methods, properties and fields by module and class.
        NAMES: functions and constants, as module and name.
        CALLS: by module and class, "" for functions, the arguments passed by kvtrie, in the syntax
            of `signatures.given`.
        OURS: by module and class of the engine, the module and the class of kvtrie derived from it.
    """

    ENGINE: str
    LOG: str
    VERSIONS: tuple[str, ...]
    USED: dict[tuple[str, str], tuple[str, ...]]
    NAMES: tuple[tuple[str, str], ...]
    CALLS: dict[tuple[str, str], dict[str, str]]
    OURS: dict[tuple[str, str], tuple[str, str]]


def load_class(surface: Surface, version: str, module: str, name: str) -> Any:  # noqa: ANN401 - a class with a base of the engine
    """Import a class of kvtrie, after a warning if the engine's version is untested.

    Raises:
        ConfigError: the engine lacks a name needed to import the class.
    """
    line = warn(surface, version)
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        if line is None:
            raise
        raise ConfigError(line) from error


def warn(surface: Surface, version: str) -> str | None:
    """Log an untested version, with its missing names and signatures, once per process.

    Returns:
        The line, None for a tested version.
    """
    parts = surface.VERSIONS[0].count(".") + 1
    if ".".join(version.split(".")[:parts]) in surface.VERSIONS:
        return None
    first, last = surface.VERSIONS[0], surface.VERSIONS[-1]
    tested = f"{first} to {last}" if first != last else first
    line = f"{surface.ENGINE} {version} is not one of the tested versions, {tested}"
    missing, refused = sorted(missing_names(surface)), refused_signatures(surface)
    if missing:
        line += f"; it lacks {len(missing)} names that kvtrie uses: {', '.join(missing)}"
    if refused:
        each = ", ".join(f"{name} {why}" for name, why in sorted(refused.items()))
        line += f"; it has {len(refused)} signatures that kvtrie does not fit: {each}"
    if not missing and not refused:
        line += "; it has all names and signatures that kvtrie uses"
    if (surface.ENGINE, line) not in _WARNED:
        _WARNED.add((surface.ENGINE, line))
        logging.getLogger(surface.LOG).warning("kvtrie: %s", line)
    return line


def members(kind: type) -> set[str]:
    """Return the names of a class: attributes, annotated fields, and names used with `self`."""
    names = set(dir(kind))
    for base in kind.__mro__[:-1]:
        names |= set(inspect.get_annotations(base))
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        names |= {part.split(":")[0].split(" ")[0] for part in source.split("self.")[1:]}
    return names


def missing_names(surface: Surface) -> frozenset[str]:
    """Return the listed names missing in the installed engine, with their modules."""
    missing: set[str] = set()
    for (module, name), used in surface.USED.items():
        kind = _find(module, name)
        if kind is None:
            missing.add(f"{module}.{name}")
        else:
            missing |= {f"{module}.{name}.{each}" for each in set(used) - members(kind)}
    missing |= {f"{module}.{name}" for module, name in surface.NAMES if _find(module, name) is None}
    return frozenset(missing)


def refused_signatures(surface: Surface) -> dict[str, str]:
    """Return the listed calls refused by the installed engine or kvtrie, with both signatures."""
    refused: dict[str, dict[str, str]] = {}
    for (module, name), calls in surface.CALLS.items():
        owner = _find(module, name) if name else _module(module)
        where = f"{module}.{name}" if name else module
        refused[where] = {} if owner is None else refused_calls(owner, calls)
    for (module, name), (ours, kind) in surface.OURS.items():
        base, mine = _find(module, name), _find(ours, kind)
        if base is not None and mine is not None:
            refused.setdefault(f"{module}.{name}", {}).update(
                refused_overrides(mine, base, surface.USED[module, name])
            )
    return {f"{where}.{name}": why for where, whys in refused.items() for name, why in whys.items()}


def _module(module: str) -> Any:  # noqa: ANN401 - a module or None
    try:
        return import_module(module)
    except Exception:  # noqa: BLE001 - a module without an import has no name
        return None


def _find(module: str, name: str) -> Any:  # noqa: ANN401 - a class, function or constant
    return getattr(_module(module), name, None)
