"""Flags of an engine among the arguments after `--`: refused, read, or left to the caller.

Invariant: no flag of the caller is overridden: a flag set by kvtrie is refused, in each spelling
accepted by engines. Cost: a look at each argument, and at a configuration file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["events_flag", "given_of", "number_of", "refuse"]

_MOST_DIGITS = 19  # of a number of processes
_SHORTEST = 8  # characters of an abbreviated flag accepted by an engine
_NOT_ABBREVIATIONS = ("--radix-eviction-policy",)


def refuse(args: Sequence[str], flags: Sequence[str]) -> None:
    """Refuse flags set by kvtrie, on the command line and in the caller's configuration file.

    Raises:
        ConfigError: a flag is there.
    """
    for flag in flags:
        for arg in args:
            if _names(arg, flag):
                raise ConfigError(f"{arg.partition('=')[0]} is given, and kvtrie sets {flag}")
    if (file := given_of(args, "--config")) is None:
        return
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):  # the engine reports the fault of its file
        return
    for key in re.findall(r"^\s*['\"]?([\w-]+)['\"]?\s*:", text, re.MULTILINE):
        if (flag := "--" + key.replace("_", "-")) in flags and flag != "--model":
            raise ConfigError(f"{file} has {key}, and kvtrie sets {flag}")


def events_flag(given: argparse.Namespace, args: list[str], config: dict[str, Any]) -> list[str]:
    """Return the flag that publishes events, unless the caller gives it."""
    if not given.events or any(_names(arg, "--kv-events-config") for arg in args):
        return []
    return ["--kv-events-config", json.dumps(config)]


def number_of(args: Sequence[str], *flags: str, absent: int = 1) -> int:
    """Return the number of processes from a flag of the engine, or `absent` without the flag."""
    value = given_of(args, *flags)
    return (
        max(1, int(value))
        if value is not None and value.isdecimal() and len(value) < _MOST_DIGITS
        else absent
    )


def given_of(args: Sequence[str], *flags: str) -> str | None:
    """Return the value of a flag of the engine, or None without the flag."""
    for at, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") in flags:
            return value if equals else next(iter(args[at + 1 :]), None)
    return None


def _names(arg: str, flag: str) -> bool:
    """Return whether an argument is a flag, in a spelling accepted by engines."""
    name = re.split("[=.]", arg, maxsplit=1)[0].replace("_", "-")
    short = len(name) >= _SHORTEST and flag.startswith(name) and name not in _NOT_ABBREVIATIONS
    return arg.startswith("--") and (name == flag or short)
