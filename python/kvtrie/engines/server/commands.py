"""Commands of an operator: hints sent to the control socket instead of with a request.

Invariant: a command is checked on arrival like request hints, and changes nothing until the engine
applies it between two steps. A failed command is counted and never ends the engine.
Cost: a few checks per command and 4 bytes per token. At most 64 commands per step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from kvtrie.engines.server.request_hints import FAR, RetainedRange, read_ranges, session_name
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.settings.argument import few, real, shown, text, word
from kvtrie.settings.hint import Prefetch, Progress, Release, Retain
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie import BlockManager

__all__ = ["COMMANDS", "MOST_PER_STEP", "Command", "CommandQueue", "read_command"]

Kind = Literal["release", "retain", "prefetch", "progress", "drop", "reset"]
COMMANDS: tuple[Kind, ...] = ("release", "retain", "prefetch", "progress", "drop", "reset")
"""Names of commands."""

MOST_PER_STEP = 64
"""Maximum number of commands applied between two steps."""

_MOST_WAITING = 1024
_MOST_TOKENS = 1 << 20
_MOST_TOKEN = 2**32 - 1
_LONGEST_S = 1e9
_HIGH = 80  # the priority of `retain` without ranges
_MORE = {"retain": ("retain", "owner"), "progress": ("eta_s",), "prefetch": ("deadline_s",)}


@dataclass(frozen=True, slots=True)
class Command:
    """A checked command.

    Attributes:
        kind: its name.
        session: the conversation of the command, None with tokens.
        tokens: the path of the command, None with a session.
        salt: the `cache_salt` of the requests with these blocks.
        ranges: the ranges to keep, for `retain`.
        owner: the author of the ranges, None for the session.
        eta_ns: for `progress`, time until the session's next request. For `prefetch`, time until
            the blocks are needed, None for at once.
    """

    kind: Kind
    session: str | None
    tokens: NDArray[np.uint32] | None
    salt: str
    ranges: tuple[RetainedRange, ...] = ()
    owner: str | None = None
    eta_ns: int | None = None


def read_command(kind: str, body: object) -> Command:
    """Check a command: `{"session": ...}` or `{"tokens": [...]}`, with `cache_salt`.

    `retain` has `retain` and `owner` as well, `progress` has `eta_s`, `prefetch` may have
    `deadline_s`. The body of `reset` is `{}`.

    Args:
        kind: its name.
        body: its parameters, of any type.

    Raises:
        ConfigError: an unknown name or field, both or none of session and tokens, or an invalid
            value.
    """
    kind = cast("Kind", word("command", kind, COMMANDS))
    if not isinstance(body, Mapping):
        raise ConfigError(f"the body is {shown(body)}, an object wanted")
    given = cast("Mapping[str, Any]", body)
    fields = ("session", "tokens", "cache_salt", *_MORE.get(kind, ()))
    fields = () if kind == "reset" else fields
    if unknown := [shown(key) for key in given if key not in fields]:
        raise ConfigError(f"{kind} has no {', '.join(unknown)}: {', '.join(fields) or '{} wanted'}")
    if kind == "reset":
        return Command(kind, None, None, "")
    named = [name for name in ("session", "tokens") if given.get(name) is not None]
    if len(named) != 1:
        raise ConfigError(f"{kind} is about one of session, tokens, not {len(named)} of them")
    if kind == "drop" and named == ["session"]:
        raise ConfigError("drop is about tokens: release a session, and its blocks leave first")
    if kind == "progress" and named == ["tokens"]:
        raise ConfigError("progress is about a session: tokens have no tool that runs")
    session = None if given.get("session") is None else text("session", given["session"])
    ranges = (RetainedRange(0, FAR, _HIGH, None),)
    if given.get("retain") is not None:
        ranges = read_ranges(given["retain"])
    salt = text("cache_salt", given.get("cache_salt") or "")
    tokens = None if session is not None else _tokens(given["tokens"])
    owner = None if given.get("owner") is None else session_name("owner", given["owner"])
    eta = None
    if kind == "progress" or given.get("deadline_s") is not None:
        name = "eta_s" if kind == "progress" else "deadline_s"
        eta = round(real(name, given.get(name), 0, _LONGEST_S) * 1e9)
    return Command(kind, session, tokens, salt, ranges if kind == "retain" else (), owner, eta)


def _tokens(given: object) -> NDArray[np.uint32]:
    rows = few("tokens", given, _MOST_TOKENS)
    try:
        found = np.array(rows)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"tokens are {shown(given)}, integers wanted") from error
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
        raise ConfigError(f"tokens are {shown(given)}, at least one integer wanted")
    if found.min() < 0 or found.max() > _MOST_TOKEN:
        raise ConfigError(f"tokens are {found.min()} to {found.max()}, 0 to {_MOST_TOKEN} wanted")
    return found.astype(np.uint32)


class PromptSequences(Protocol):
    """Conversion of prompts to the manager's sequences, if they differ."""

    def command(self, command: Command) -> Command:
        """Convert a command for a prompt to a command for its sequence."""
        ...

    def scope(self, scope: Scope) -> Scope:
        """Return the scope of a prompt's sequence."""
        ...


class CommandQueue:
    """Queue of commands for the engine's next step.

    Attributes:
        applied: number of applied commands.
        failed: number of failed commands.
        error: the error of the last failed command, "" for none.
    """

    def __init__(self) -> None:
        self._waiting: deque[Command] = deque()
        self._lock = threading.Lock()
        self.applied = self.failed = 0
        self.error = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, command: Command) -> int | None:
        """Queue a command. Return the length of the queue, or None if it is full."""
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING:
                return None
            self._waiting.append(command)
            return len(self._waiting)

    def apply(
        self,
        manager: BlockManager,
        identity: str,
        now: int,
        sequences: PromptSequences | None = None,
    ) -> bool:
        """Apply up to 64 commands, except `reset`. Return whether the caller must reset.

        Args:
            manager: the manager of the blocks.
            identity: the name of the weights in scopes.
            now: the time.
            sequences: converts prompts to the manager's sequences, None if they are equal.
        """
        reset = False
        for _ in range(min(MOST_PER_STEP, len(self._waiting))):
            command = self._waiting.popleft()
            reset |= command.kind == "reset"
            try:
                scope = Scope(tenant=command.salt.encode(), lora=identity)
                if sequences is not None:
                    command, scope = sequences.command(command), sequences.scope(scope)
                _apply(manager, command, scope, now)
            except KvtrieError as error:
                self.failed += 1
                self.error = f"{command.kind}: {error}"
            else:
                self.applied += 1
        return reset

    def as_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {
            "waiting": len(self._waiting),
            "applied": self.applied,
            "failed": self.failed,
            "error": self.error,
        }


def _apply(manager: BlockManager, command: Command, scope: Scope, now: int) -> None:
    about: dict[str, Any] = {"session": command.session, "tokens": command.tokens, "scope": scope}
    if command.kind == "release":
        manager.hint([Release(**about)], now=now)
    elif command.kind == "prefetch":
        deadline = None if command.eta_ns is None else now + command.eta_ns
        manager.hint([Prefetch(tier="host", deadline=deadline, **about)], now=now)
    elif command.session is not None and command.eta_ns is not None:
        hint = Progress(session=command.session, eta=command.eta_ns, tier="host", scope=scope)
        manager.hint([hint], now=now)
    elif command.kind == "retain":
        for each in command.ranges:
            end = None if each.last == FAR else each.last
            hint = Retain(
                owner=command.owner,
                priority=each.priority,
                start=each.start,
                end=end,
                ttl=each.ttl_ns,
                **about,
            )
            manager.hint([hint], now=now)
    elif command.tokens is not None:
        # Tiers below the engine's own, the slowest first.
        for tier in range(len(manager.stats().tiers) - 1, 0, -1):
            manager.mark(command.tokens, tier, present=False, now=now, scope=scope)
