"""Hints: advice of an engine or an agent on the future of blocks, for `BlockManager.hint`.

Every block has a priority from 0 to 100, 35 without a hint. A block of lower priority
leaves its tier before one of higher priority; among equals the policy decides. Invariant: a hint is
soft, it pins nothing and makes no request fail. Cost: plain values, read once per hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import instance, put, real, salt, text, whole
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvtrie._kvtrie import Lease

    Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | Buffer

__all__ = ["Demote", "Hint", "Prefetch", "Progress", "Quota", "Release", "ResumeAt", "Retain"]

Duration: TypeAlias = int | timedelta
"""Nanoseconds, or a timedelta."""

TierName: TypeAlias = int | Literal["gpu", "host", "disk", "remote"]

_HIGHEST = 100
_LATEST = 2**63 - 1
_MOST_BORDERS = 1 << 16


def _one_of(what: str, **given: object) -> None:
    """Refuse anything but exactly one of these."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        wanted = ", ".join(given)
        raise ConfigError(f"{what} is about one of {wanted}, not {len(named)} of them: {named}")


def _nanos(name: str, duration: Duration | None) -> int | None:
    return None if duration is None else _given_nanos(name, duration, 1)


def _given_nanos(name: str, duration: Duration, low: int) -> int:
    if isinstance(duration, timedelta):
        duration = (duration // timedelta(microseconds=1)) * 1000
    return whole(name, duration, low, _LATEST)


def _named(hint: Retain | Release | Prefetch | Demote | ResumeAt | Progress, *names: str) -> None:
    """Check names that may be left out, and whose blocks are meant."""
    for name in names:
        if (given := getattr(hint, name)) is not None:
            text(name, given)
    if hint.scope is not None:
        instance("scope", hint.scope, Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retain:
    """A priority for a range of tokens of a path, and one for tokens that are still to come.

    Above 35 blocks stay longer than those of which nothing is said, below 35 less long. Owners do
    not overrule each other: of all priorities that are said of a block the highest counts, and what
    an owner says replaces what it said of the block before.

    Attributes:
        tokens: the path as a sequence; its full blocks are meant. Those that are not cached yet
            wait for their commit. Give one of `tokens`, `lease` and `session`.
        lease: the path of a lease (or its id), and what it will commit.
        session: the path of a conversation, and what its leases will commit, until it is released.
        priority: 0 to 100.
        start: first token of the range; a block belongs to the range if its first token does.
        end: the last token plus 1; None is the end of the prompt.
        ttl: for how long this holds, from now on, in nanoseconds or as a timedelta; None is for
            good.
        decode_priority: the priority of blocks after the prompt of a lease or of the session's
            leases; None leaves it unset.
        decode_ttl: for how long that holds, from the commit of each such block on.
        owner: the author of the hint; None is the session, or no one in particular.
        scope: whose blocks, with `tokens`, or whose session; names of sessions and owners count
            within their scope.

    Raises:
        ConfigError: none or several paths, a priority, a range or a time that cannot be.
    """

    tokens: Tokens | None = None
    lease: Lease | int | None = None
    session: str | None = None
    priority: int = 35
    start: int = 0
    end: int | None = None
    ttl: Duration | None = None
    decode_priority: int | None = None
    decode_ttl: Duration | None = None
    owner: str | None = None
    scope: Scope | None = None

    def __post_init__(self) -> None:
        _one_of("Retain", tokens=self.tokens, lease=self.lease, session=self.session)
        _named(self, "session", "owner")
        put(
            self,
            priority=whole("priority", self.priority, 0, _HIGHEST),
            start=whole("start", self.start, 0, _LATEST),
            ttl=_nanos("ttl", self.ttl),
            decode_ttl=_nanos("decode_ttl", self.decode_ttl),
        )
        if self.decode_priority is not None:
            decode = whole("decode_priority", self.decode_priority, 0, _HIGHEST)
            put(self, decode_priority=decode)
        if self.end is not None:
            put(self, end=whole("end", self.end, 0, _LATEST))
        if self.end is not None and self.end < self.start:
            raise ConfigError(f"a range of tokens from {self.start} to {self.end}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Blocks that are wanted no more: they leave first, until a request uses them again.

    A block stays as it is while another owner wants it: a lease holds it, another session that is
    not over goes through it, or another owner retains it.

    Attributes:
        session: a conversation that is over: it is forgotten with its last lease, unless a request
            of it comes before. Give one of `session`, `owner` and `tokens`.
        owner: an agent that is gone: all that it retained. With `tokens`, whose say is taken back.
        tokens: a sequence; its full blocks are meant.
        scope: whose session, owner or blocks.

    Raises:
        ConfigError: nothing, or several things, to release.
    """

    session: str | None = None
    owner: str | None = None
    tokens: Tokens | None = None
    scope: Scope | None = None

    def __post_init__(self) -> None:
        if self.tokens is None:
            _one_of("Release", session=self.session, owner=self.owner)
        elif self.session is not None:
            _one_of("Release", session=self.session, tokens=self.tokens)
        _named(self, "session", "owner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Brings the cached blocks of a path up to a tier, ahead of a request.

    With a deadline the loads begin as late as the lanes allow: `BlockManager.next_due` returns the
    time for the next call of `hint`. A request that comes before loads the blocks at once.
    At most a quarter of a tier is on its way unasked.

    Attributes:
        tokens: the path as a sequence. Give one of `tokens`, `lease` and `session`.
        lease: the path of a lease, or its id.
        session: the path of a conversation.
        tier: where to, by kind or index; any but the last one.
        deadline: when the blocks are wanted, a time of the manager's clock in nanoseconds. Blocks
            that would be there later are not brought. None begins at once.
        scope: whose blocks, with `tokens`, or whose session.

    Raises:
        ConfigError: none or several paths.
    """

    tokens: Tokens | None = None
    lease: Lease | int | None = None
    session: str | None = None
    tier: TierName = "gpu"
    deadline: int | None = None
    scope: Scope | None = None

    def __post_init__(self) -> None:
        _one_of("Prefetch", tokens=self.tokens, lease=self.lease, session=self.session)
        _named(self, "session")
        if self.deadline is not None:
            put(self, deadline=whole("deadline", self.deadline, 0, _LATEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demote:
    """Takes the blocks of a path down to a tier, one tier per step; nothing is dropped for it.

    Attributes:
        tokens: the path as a sequence. Give one of `tokens`, `lease` and `session`.
        lease: the path of a lease, or its id; what it holds stays on the first tier.
        session: the path of a conversation.
        tier: where to, by kind or index; any but the first one.
        scope: whose blocks, with `tokens`, or whose session.

    Raises:
        ConfigError: none or several paths.
    """

    tokens: Tokens | None = None
    lease: Lease | int | None = None
    session: str | None = None
    tier: TierName = "host"
    scope: Scope | None = None

    def __post_init__(self) -> None:
        _one_of("Demote", tokens=self.tokens, lease=self.lease, session=self.session)
        _named(self, "session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How much of a tier a tenant may hold before its own blocks leave first, whatever they are.

    Attributes:
        tenant: the tenant's salt, as in `Scope.tenant`.
        blocks: maximum number of blocks; with `share` the smaller limit counts. Without both the
            quota ends.
        share: at most this share of the tier's blocks, 0 to 1.
        tier: by kind or index.

    Raises:
        ConfigError: a number that cannot be.
    """

    tenant: bytes
    blocks: int | None = None
    share: float | None = None
    tier: TierName = "gpu"

    def __post_init__(self) -> None:
        put(self, tenant=salt("tenant of a quota", self.tenant))
        if self.blocks is not None:
            put(self, blocks=whole("blocks of a quota", self.blocks, 0, _LATEST))
        if self.share is not None:
            put(self, share=real("share of a quota", self.share, 0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAt:
    """Keeps borders of a path resumable, in a model of several groups of layers.

    A border at which a tier has the windows and states that a request needs becomes a resume point
    at once. Another one waits: `plan.resume` of the next request that computes it names it, so that
    a pass ends there. Newer resume points of the path do not replace the point.

    Attributes:
        tokens: the path as a sequence, cached or not. Give one of `tokens`, `lease` and `session`.
        lease: the path that a lease has committed, or its id.
        session: the cached path of a conversation.
        borders: tokens before each border, at the end of a block of the path; at most 65,536.
        scope: whose blocks, with `tokens`, or whose session.

    Raises:
        ConfigError: none or several paths, no border or too many. `BlockManager.hint` raises it
            for a border inside a block or off the path, and for a model with one group.
    """

    tokens: Tokens | None = None
    lease: Lease | int | None = None
    session: str | None = None
    borders: Sequence[int]
    scope: Scope | None = None

    def __post_init__(self) -> None:
        _one_of("ResumeAt", tokens=self.tokens, lease=self.lease, session=self.session)
        _named(self, "session")
        if isinstance(self.borders, str | bytes) or not hasattr(self.borders, "__iter__"):
            kind = type(self.borders).__name__
            raise ConfigError(f"borders are of type {kind}, a sequence of token counts wanted")
        named = tuple(islice(self.borders, _MOST_BORDERS + 1))
        if not 1 <= len(named) <= _MOST_BORDERS:
            count = len(named) if not named else f"more than {_MOST_BORDERS}"
            raise ConfigError(f"{count} borders are named, 1 to {_MOST_BORDERS} wanted")
        borders = tuple(whole("a border", border, 1, _LATEST) for border in named)
        put(self, borders=borders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """States when the next request of a session will come, as its tool estimates it.

    Each hint replaces the session's one before, until the session's next request. A policy that
    learns ranks the session's blocks by the time that is left, so that blocks of a session that
    comes later leave first. The blocks are loaded to `tier` in time, by the first call of
    `Lease.release` or `hint` after the time at which the loads are to begin, which
    `BlockManager.next_due` returns.

    Attributes:
        session: the conversation whose tool runs.
        eta: time until its next request, in nanoseconds or as a timedelta.
        tier: tier on which the blocks are wanted then, by kind or index. They are loaded from tiers
            below it.
        scope: whose session.

    Raises:
        ConfigError: no session, or a time that cannot be.
    """

    session: str
    eta: Duration
    tier: TierName = "gpu"
    scope: Scope | None = None

    def __post_init__(self) -> None:
        _named(self, "session")
        put(self, session=text("session", self.session), eta=_given_nanos("eta", self.eta, 0))


Hint: TypeAlias = Retain | Release | Prefetch | Demote | Quota | ResumeAt | Progress
