"""The table `trace`: where requests come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrie.argument import shown
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["TraceSource", "trace_of"]

_HASH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceSource:
    """The trace of a run.

    Attributes:
        path: the file.
        format: "tokens" or "mooncake".
        output: whether answers are made; without, a request ends with its first token.
        hash_tokens: tokens that a hash of a Mooncake trace stands for.
    """

    path: Path
    format: str = "tokens"
    output: bool = True
    hash_tokens: int = _HASH_TOKENS


def trace_of(table: Table, folder: Path) -> TraceSource:
    """The trace that a table names; a relative path starts at `folder` if the file is there."""
    given = table.take("path")
    if not isinstance(given, str) or not given:
        raise ConfigError(f"trace.path is {shown(given)}, the name of a file wanted")
    path = folder / given
    source = TraceSource(
        path=path if path.exists() else Path(given),
        format=table.word("format", ("tokens", "mooncake")),
        output=table.flag("output", default=True),
        hash_tokens=table.number("hash_tokens", _HASH_TOKENS, 1, 2**31 - 1),
    )
    table.close()
    return source
