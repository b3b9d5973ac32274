"""Chats of several clients, turn by turn, through a router.

Invariant: a turn whose machine fails is sent again, with the same id; a turn ends when its answer
is what the model gives, or the patience of its client does. Cost: the engines' time.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from examples.cluster import model
from kvtrie import NoMachineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from examples.cluster.engine_settings import EngineSettings
    from examples.cluster.routers import Router

ANSWER = 16
"""Tokens of an answer."""

TIMEOUT_S = 3.0
"""Seconds without a byte from a machine, after which a request is sent to another."""

_PATIENCE_S = 60.0
_RETRY_S = 0.05


@dataclass(frozen=True)
class Workload:
    """Sizes of the chats.

    Attributes:
        chats: number of chats.
        turns: messages of each chat.
        message: tokens of a message.
        system: tokens of the system prompt, of which there are three.
        clients: chats that run at once.
        seed: seed of the tokens.
    """

    chats: int = 30
    turns: int = 12
    message: int = 80
    system: int = 128
    clients: int = 6
    seed: int = 1


@dataclass(frozen=True)
class Turn:
    """A turn that has been answered, or given up.

    Attributes:
        at: seconds from the beginning of the play to its arrival.
        machines: the machines that it was sent to, in order.
        first_token_s: seconds from its arrival to its first token.
        seconds: seconds from its arrival to its end.
        prompt: tokens of its prompt.
        found: tokens that the caches of its machine had.
        computed: tokens that its machine computed.
        wrong: tokens found with KV of something else, or of a wrong answer.
        busy_s: seconds that it was queued and computed at its machine.
        error: empty, or why it was given up.
    """

    at: float
    machines: list[int]
    first_token_s: float
    seconds: float
    prompt: int
    found: int
    computed: int
    wrong: int
    busy_s: float
    error: str = ""


@dataclass
class Played:
    """The turns of a play.

    Attributes:
        turns: the turns that have ended, in that order.
        marks: what happened at which second, as "engine 1 is killed".
    """

    turns: list[Turn] = field(default_factory=list[Turn])
    marks: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    @property
    def computed(self) -> int:
        """Prompt tokens that engines computed."""
        return sum(turn.computed for turn in self.turns)

    @property
    def found(self) -> float:
        """Share of prompt tokens that caches had."""
        prompt = sum(turn.prompt for turn in self.turns)
        return sum(turn.found for turn in self.turns) / max(prompt, 1)


class Player:
    """Plays chats over HTTP.

    Args:
        router: chooses the machines.
        engines: the machines.

    Attributes:
        played: what has been played so far.
    """

    def __init__(self, router: Router, engines: Sequence[EngineSettings]) -> None:
        self._router, self._engines = router, engines
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._requests = 0
        self.played = Played()

    def play(self, load: Workload, events: dict[int, Callable[[], str]] | None = None) -> Played:
        """Play chats to their end.

        Args:
            load: sizes of the chats.
            events: actions by the number of turns after which they are due; each returns a mark.
        """
        rng = random.Random(load.seed)  # noqa: S311 - tokens need no secrecy
        systems = [_tokens(rng, load.system) for _ in range(3)]
        chats = [
            [systems[at % len(systems)]] + [_tokens(rng, load.message) for _ in range(load.turns)]
            for at in range(load.chats)
        ]
        # Clients take the turns of their chats in rotation, so that each chat pauses between two.
        lanes = [chats[at :: load.clients] for at in range(load.clients)]
        due = dict(events or {})
        threads = [threading.Thread(target=self._client, args=(lane, due)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.played

    def _client(self, chats: list[list[list[int]]], due: dict[int, Callable[[], str]]) -> None:
        histories = [list(chat[0]) for chat in chats]
        for turn in range(1, max(map(len, chats), default=1)):
            for at, chat in enumerate(chats):
                histories[at] += chat[turn]
                histories[at] += self.ask(histories[at])
                self._look(due)

    def _look(self, due: dict[int, Callable[[], str]]) -> None:
        """Do what is due now; other clients go on."""
        with self._lock:
            now = [at for at in due if at <= len(self.played.turns)]
            actions = [due.pop(at) for at in now]
        for action in actions:
            began = time.monotonic() - self._began
            self.played.marks.append((began, action()))

    def ask(self, tokens: list[int]) -> list[int]:
        """Send a turn until it is answered; the answer."""
        began = time.monotonic()
        with self._lock:
            self._requests += 1
            name = str(self._requests)
        machines: list[int] = []
        first, result, error = 0.0, dict[str, Any](), "no machine answered"
        while time.monotonic() - began < _PATIENCE_S:
            try:
                machine = self._router.pick(name, tokens)
            except NoMachineError:
                time.sleep(_RETRY_S)
                continue
            machines.append(machine)
            try:
                first, result = self._send(machine, name, tokens)
            except (OSError, http.client.HTTPException, ValueError):
                self._router.done(name, failed=True)
                continue
            self._router.done(name)
            error = ""
            break
        ended = time.monotonic()
        turn = Turn(
            at=began - self._began,
            machines=machines,
            first_token_s=first - began if not error else ended - began,
            seconds=ended - began,
            prompt=len(tokens),
            found=result.get("found", 0),
            computed=result.get("computed", 0),
            wrong=result.get("wrong", 0),
            busy_s=result.get("busy_s", 0.0),
            error=error,
        )
        with self._lock:
            self.played.turns.append(turn)
        return model.answer(tokens, ANSWER)

    def _send(self, machine: int, name: str, tokens: list[int]) -> tuple[float, dict[str, Any]]:
        """Send a request to a machine; when its first token came, and its counts."""
        engine = self._engines[machine]
        connection = http.client.HTTPConnection(engine.address, engine.port, timeout=TIMEOUT_S)
        try:
            body = json.dumps({"tokens": tokens, "output": ANSWER})
            connection.request("POST", "/generate", body)
            response = connection.getresponse()
            counts = json.loads(response.readline())
            first = time.monotonic()
            self._router.prefilled(name)
            answer = json.loads(response.readline())["answer"]
        finally:
            connection.close()
        if answer != model.answer(tokens, ANSWER):
            counts["wrong"] += len(tokens)
        return first, counts


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(model.VOCABULARY) for _ in range(count)]
