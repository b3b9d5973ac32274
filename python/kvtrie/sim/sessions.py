"""Sessions of a trace: their tenants, last requests and tool reports.

Cost: a pass over the trace before it is played, with a number per session in memory, and a number
per request if tools report.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import flag, put, real, whole, word
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtrie.sim.readers.rows import AnyRow, OptionalFields, RowWithMore

__all__ = ["Reports", "Tenants", "last_ones", "with_sessions"]

ReportHint: TypeAlias = Literal["progress", "prefetch", "prefetch-now"]
ReportTier: TypeAlias = Literal["gpu", "host", "disk", "remote"]

_MOST_REPORTS = 100
_MOST_TENANTS = 2**20


@dataclass(frozen=True, slots=True)
class Reports:
    """Progress reports of tools between two requests of a session.

    A tool reports at its start and after equal parts of its time. The reported time left is the
    actual time left times a factor with a normally distributed logarithm around 0.

    Attributes:
        number: reports per tool, 0 for none.
        error: standard deviation of the logarithm of the factor.
        hint: hint made from a report: "progress", "prefetch" (by the reported end of the tool) or
            "prefetch-now" (at once).
        tier: kind of the target tier of the session's blocks.
        demote: whether the start of a tool sends `Demote` to the last tier.
    """

    number: int = 0
    error: float = 0.5
    hint: ReportHint = "progress"
    tier: ReportTier = "gpu"
    demote: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        put(
            self,
            number=whole("number", self.number, 0, _MOST_REPORTS),
            error=real("error", self.error, 0, 10),
            hint=word("hint", self.hint, get_args(ReportHint)),
            tier=word("tier", self.tier, get_args(ReportTier)),
            demote=flag("demote", self.demote),
        )

    def of(self, rng: random.Random) -> list[tuple[int, int]]:
        """Draw the reports of a tool, in the format of `OptionalFields`."""
        return [
            (1000 * at // self.number, min(round(1000 * math.exp(rng.gauss(0, self.error))), 10**9))
            for at in range(self.number)
        ]


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tenants, each with the same probability for every session of a trace.

    Attributes:
        number: number of tenants. 0 means requests without a tenant, sharing all blocks.
        share_after: as in `Scope`. None shares nothing between tenants.

    Raises:
        ConfigError: `share_after` without tenants.
    """

    number: int = 0
    share_after: int | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        put(self, number=whole("number", self.number, 0, _MOST_TENANTS))
        if self.share_after is not None:
            if not self.number:
                raise ConfigError(f"share_after is {self.share_after} without tenants")
            Scope(tenant=b"0", share_after=self.share_after)

    def scope(self, session: str, seed: int) -> Scope | None:
        """Return the scope of a session, if there are tenants."""
        if not self.number:
            return None
        drawn = hashlib.blake2b(f"{seed}/{session}".encode(), digest_size=8).digest()
        tenant = str(int.from_bytes(drawn, "big") % self.number).encode()
        return Scope(tenant=tenant, share_after=self.share_after)


def last_ones(sessions: Iterable[str | None]) -> set[int]:
    """Return the trace indices of the last request of each session.

    Args:
        sessions: session of each request in trace order, or None.
    """
    last = {session: at for at, session in enumerate(sessions) if session is not None}
    return set(last.values())


def with_sessions(
    requests: Iterable[AnyRow],
    once: Iterable[AnyRow],
    *,
    ends: bool,
    reports: Reports,
    tenants: Tenants,
    seed: int,
) -> Iterator[RowWithMore]:
    """Yield each request with the additional fields of its session.

    Args:
        requests: requests in arrival order.
        once: the same requests, to look ahead.
        ends: whether to mark a session's last request.
        reports: reports of the tool before each further request of a session.
        tenants: tenants of the sessions. A request without a session is a separate session.
        seed: seed of the draws.

    Raises:
        ConfigError: tools report, and a request waits for earlier requests.
    """
    arrivals: list[int] = []
    after: dict[int, int] = {}
    newest: dict[str, int] = {}
    for at, request in enumerate(once):
        arrivals.append(request[0])
        if (session := request[4]) is not None:
            if session in newest:
                after[newest[session]] = at
            newest[session] = at
    last = set(newest.values()) if ends else set[int]()
    rng = random.Random(seed)  # noqa: S311 - a workload needs no secrecy
    for at, request in enumerate(requests):
        fields = cast(
            "OptionalFields",
            request[5] if len(request) > 5 else {},  # noqa: PLR2004 - has optional fields
        )
        more = cast("OptionalFields", {**fields, "last": at in last})
        if reports.number and "after" in more:
            raise ConfigError(
                f"trace.reports.number is {reports.number}, but request {at + 1} waits for others "
                "and a tool reports before an arrival of the trace"
            )
        if reports.number and at in after:
            more["tool"] = (arrivals[after[at]], reports.of(rng))
        scope = tenants.scope(f"{at}" if request[4] is None else request[4], seed)
        if scope is not None:
            more["scope"] = scope
        yield (*request[:5], more)
