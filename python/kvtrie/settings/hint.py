"""Hints: advice of an engine or an agent on the future of blocks, for `BlockManager.hint`.

Every block has a priority from 0 to 100, 35 without a hint. Blocks of lower priority leave their
tier first. Among equal priorities the policy decides. Invariant: a hint is soft, it pins nothing
and makes no request fail. Cost: plain values, read once per hint.
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
    """Refuse anything but exactly one value."""
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
    """Check optional names and the scope of a hint."""
    for name in names:
        if (given := getattr(hint, name)) is not None:
            text(name, given)
    if hint.scope is not None:
        instance("scope", hint.scope, Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retain:
    """A priority for a range of tokens of a path, and a priority for later tokens.

    Blocks above 35 stay longer than blocks without a hint, blocks below 35 less long. Owners do not
    overrule each other: the highest priority of all owners counts, and an owner's new hint replaces
    the owner's earlier hint for the block.

    Attributes:
        tokens: the path as a sequence, for its full blocks. The hint waits for the commit of blocks
            that are not cached yet. Give either `tokens`, `lease` or `session`.
        lease: the path of a lease (or its id), with its later commits.
        session: the path of a conversation, with later commits of its leases, until its release.
        priority: 0 to 100.
        start: first token of the range. A block belongs to the range if its first token does.
        end: the last token plus 1. None is the end of the prompt.
        ttl: duration from now on, in nanoseconds or as a timedelta. None is unlimited.
        decode_priority: the priority of blocks after the prompt of a lease or of the session's
            leases. None leaves it unset.
        decode_ttl: duration of `decode_priority`, from the commit of each block on.
        owner: the author of the hint. None is the session, or an unnamed owner.
        scope: scope of the blocks, with `tokens`, or of the session. Names of sessions and owners
            count within their scope.

    Raises:
        ConfigError: none or several paths, an invalid priority, range or time.
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
    """Blocks not needed any more: they leave first, until a request uses them again.

    A block keeps its priority while it is still needed: by a lease, by another unfinished session,
    or by another owner's hint.

    Attributes:
        session: a finished conversation. It is forgotten with its last lease, unless it gets a new
            request before. Give either `session`, `owner` or `tokens`.
        owner: a finished agent: releases all its retained blocks. With `tokens`, the owner of the
            hint to take back.
        tokens: a sequence, for its full blocks.
        scope: scope of the session, owner or blocks.

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
    time for the next call of `hint`. An earlier request loads the blocks at once. At most a quarter
    of a tier is loading without a request.

    Attributes:
        tokens: the path as a sequence. Give either `tokens`, `lease` or `session`.
        lease: the path of a lease, or its id.
        session: the path of a conversation.
        tier: destination, by kind or index, any tier but the last.
        deadline: when the blocks are needed, a time of the manager's clock in nanoseconds. Later
            blocks are not loaded. None begins at once.
        scope: scope of the blocks, with `tokens`, or of the session.

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
    """Takes the blocks of a path down to a tier, one tier per step. Nothing is dropped for it.

    Attributes:
        tokens: the path as a sequence. Give either `tokens`, `lease` or `session`.
        lease: the path of a lease, or its id. Its held blocks stay on the first tier.
        session: the path of a conversation.
        tier: destination, by kind or index, any tier but the first.
        scope: scope of the blocks, with `tokens`, or of the session.

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
    """Limit of a tenant's blocks on a tier. Beyond it the tenant's own blocks are evicted first.

    Attributes:
        tenant: the tenant's salt, as in `Scope.tenant`.
        blocks: maximum number of blocks. With `share` the smaller limit counts. Without both the
            quota ends.
        share: maximum share of the tier's blocks, 0 to 1.
        tier: by kind or index.

    Raises:
        ConfigError: an invalid number.
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

    If a tier has the windows and states for a border, it becomes a resume point at once. Otherwise
    it waits: the next request that computes the border gets it in `plan.resume`, so a pass ends
    there. Newer resume points of the path do not replace the point.

    Attributes:
        tokens: the path as a sequence, cached or not. Give either `tokens`, `lease` or `session`.
        lease: the committed path of a lease, or its id.
        session: the cached path of a conversation.
        borders: tokens before each border, at the end of a block of the path, at most 65,536.
        scope: scope of the blocks, with `tokens`, or of the session.

    Raises:
        ConfigError: none or several paths, no border or too many. `BlockManager.hint` raises it
            for a border inside a block or off the path, and for a model with a single group.
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
    """Estimated time of the next request of a session with a running tool.

    Each hint replaces the session's previous hint, until the session's next request. A policy that
    learns ranks the session's blocks by the remaining time: blocks of later sessions leave first.
    The blocks are loaded to `tier` in time, by the first call of `Lease.release` or `hint` after
    the start time of the loads, as returned by `BlockManager.next_due`.

    Attributes:
        session: the conversation with the running tool.
        eta: time until its next request, in nanoseconds or as a timedelta.
        tier: destination tier of the blocks, by kind or index. They are loaded from the tiers
            below.
        scope: scope of the session.

    Raises:
        ConfigError: no session, or an invalid time.
    """

    session: str
    eta: Duration
    tier: TierName = "gpu"
    scope: Scope | None = None

    def __post_init__(self) -> None:
        _named(self, "session")
        put(self, session=text("session", self.session), eta=_given_nanos("eta", self.eta, 0))


Hint: TypeAlias = Retain | Release | Prefetch | Demote | Quota | ResumeAt | Progress
