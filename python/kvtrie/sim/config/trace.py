"""Table `trace`: source of requests, a file or a generator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown
from kvtrie.sim.arrivals import Arrivals
from kvtrie.sim.config.table import made, plain
from kvtrie.sim.readers.times import TIME_UNITS
from kvtrie.sim.sessions import Reports, Tenants
from kvtrie.sim.workloads.families import FAMILIES
from kvtrie.sim.workloads.family import Family
from kvtrie.sim.workloads.segments import Segments
from kvtrie.sim.workloads.sharegpt import ShareGptLike

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["FORMATS", "Generator", "TraceSource", "checked", "trace_of"]

FORMATS = ("tokens", "mooncake", "azure", "burstgpt", "sharegpt")
"""Formats of trace files, named like their readers."""

Generator: TypeAlias = Family | Segments | ShareGptLike
"""Generator of requests from settings."""

_GENERATORS: dict[str, type[Segments | ShareGptLike]] = {
    "segments": Segments,
    "sharegpt-like": ShareGptLike,
}
_HASH_TOKENS = 512
_MOST_THINK_S = 1e9


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Trace of a run.

    Attributes:
        path: trace file, or name of the generator.
        format: format among `FORMATS`, or name of the generator.
        output: whether to produce answers. Otherwise, a request ends with its first token.
        hash_tokens: tokens per hash of a Mooncake trace, or per id of a family.
        time_unit: unit of `timestamp` in a Mooncake trace, or "auto".
        lenient: skip and count invalid lines.
        tokenizer: tokenizer of ShareGPT texts, "words" or a `tokenizer.json`.
        arrivals: start times of ShareGPT conversations, or their number of clients.
        think_s: mean think time in seconds between two turns of a conversation.
        seed: seed of all draws.
        generator: generator of the requests, unless read from a file.
        ends: whether managers are notified after a session's last request.
        reports: tool reports between two requests of a session.
        tenants: tenants of the sessions.
    """

    path: Path
    format: str = "tokens"
    output: bool = True
    hash_tokens: int = _HASH_TOKENS
    time_unit: str = TIME_UNITS[0]
    lenient: bool = False
    tokenizer: str = "words"
    arrivals: Arrivals = field(default_factory=Arrivals)
    think_s: float = 10.0
    seed: int = 0
    generator: Generator | None = None
    ends: bool = False
    reports: Reports = field(default_factory=Reports)
    tenants: Tenants = field(default_factory=Tenants)

    @property
    def clients(self) -> int | None:
        """Number of clients in a closed loop, or None."""
        drawn = self.arrivals
        if self.generator is not None:
            if isinstance(self.generator, Family):
                return None
            drawn = self.generator.arrivals
        elif self.format != "sharegpt":
            return None
        return drawn.clients if drawn.closed else None

    @property
    def hashed(self) -> bool:
        """Whether each token for managers represents a block."""
        return self.format not in {"tokens", "sharegpt"}

    @property
    def ready(self) -> bool:
        """Whether an id represents `hash_tokens` tokens instead of a block of the run."""
        return self.format == "mooncake" or isinstance(self.generator, Family)


def trace_of(table: Table, folder: Path, seed: int = 0) -> TraceSource:
    """Return the trace of a table. A relative path starts at `folder` if the file exists there."""
    kind = table.word("format", (*FORMATS, *FAMILIES, *_GENERATORS))
    output = table.flag("output", default=True)
    sessions = {
        "ends": table.flag("ends", default=False),
        "reports": _of(table, "reports", Reports),
        "tenants": _of(table, "tenants", Tenants),
    }
    if kind not in FORMATS:
        generator = _generator(table, kind)
        table.close()
        source = TraceSource(Path(kind), kind, output, seed=seed, generator=generator)
        return checked(replace(source, **sessions))
    given = table.take("path")
    if not isinstance(given, str) or not given:
        raise ConfigError(f"trace.path is {shown(given)}, the name of a file wanted")
    path = folder / given
    source = TraceSource(
        path=path if path.exists() else Path(given),
        format=kind,
        output=output,
        hash_tokens=table.number("hash_tokens", _HASH_TOKENS, 1, 2**31 - 1),
        time_unit=table.word("time_unit", TIME_UNITS),
        lenient=table.flag("lenient", default=False),
        tokenizer=table.text("tokenizer", "words"),
        arrivals=_of(table, "arrivals", Arrivals),
        think_s=table.real("think_s", 10.0, 0, _MOST_THINK_S),
        seed=seed,
    )
    table.close()
    return checked(replace(source, **sessions))


def _generator(table: Table, kind: str) -> Generator:
    if kind in FAMILIES:
        return made("trace", Family, {"name": kind, **table.some("requests")})
    of = _GENERATORS[kind]
    stated = table.some(*plain(of, "arrivals"))
    return made("trace", of, {**stated, "arrivals": _of(table, "arrivals", Arrivals)})


def checked(source: TraceSource) -> TraceSource:
    """Return a trace with consistent settings.

    Raises:
        ConfigError: contradictory settings.
    """
    if source.time_unit != TIME_UNITS[0] and source.format != "mooncake":
        raise ConfigError(
            f"trace.time_unit is {source.time_unit!r}, but times of the format {source.format} "
            "have one unit"
        )
    if source.reports.number and source.clients is not None:
        raise ConfigError(
            f"trace.reports.number is {source.reports.number} with {source.clients} clients that "
            "wait for answers, but a tool reports before an arrival of the trace"
        )
    return source


def _of(outer: Table, name: str, kind: type[Reports | Tenants | Arrivals]) -> Any:  # noqa: ANN401
    """Return an object of the settings class for a nested table of the trace."""
    table = outer.table(name)
    stated = table.some(*plain(kind))
    table.close()
    return made(f"trace.{name}", kind, stated)
