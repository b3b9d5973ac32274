"""Blocks that are shared after k tenants: what a prober finds, and what tenants lose by it.

    make bench-sharing ARGS="--trace mooncake_conversation_trace.jsonl"

`attack` plays a prober in the simulator. A tenant has sent prompts of random tokens; the prober
knows all tokens before the next one and sends each candidate for it from each of its accounts. It
takes the candidate of which its accounts find most tokens, of several such ones that with the
earliest first tokens, of several such ones any. Blocks have one token, the worst case.
`hits` plays chats of 50 tenants: the conversations of the published trace, each after one of eight
system prompts instead of the trace's one, and each of a tenant that is drawn. Cost: two minutes.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benches.core.place import place
from benches.core.referee import ROOT
from benches.record import Result, document, keep, options, show
from kvtrie import Scope, Tier
from kvtrie.sim.config import config_of
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.run import open_simulation
from kvtrie.sim.sessions import Tenants
from kvtrie.sim.trace import read_trace
from kvtrie.sim.workloads import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtrie._kvtrie import Simulation
    from kvtrie.sim.readers.rows import OptionalFields, Record, RowWithMore
    from kvtrie.sim.trace import TraceRequest

OUT = ROOT / "benches/results/sharing.json"
TENANTS = 50
AFTER = (2, 3, 5)
CANDIDATES, PROMPTS, SECRET, SYSTEM = 32, 25, 8, 16  # tokens
MOST_SIGMAS = 3.0
SYSTEMS = (1, 2, 3, 3, 4, 5, 6, 8)  # blocks of eight system prompts, the most popular one first
SHARES = (0.03, 0.1, 0.3)
MOST_LOST, LEAST_KEPT = 0.02, 0.8

Mode = tuple[str, int | None]
"""How tenants share: "all", "salts" or "after", and then after how many."""


def scope(mode: Mode, tenant: str) -> Scope | None:
    """The scope of a tenant's requests."""
    kind, after = mode
    return None if kind == "all" else Scope(tenant=tenant.encode(), share_after=after)


def world() -> Simulation:
    """A machine whose GPU computes 20 000 tokens a second and holds all prompts."""
    tables: dict[str, Any] = {
        "trace": {"format": "segments"},
        "model": {"layers": 4, "kv_heads": 1, "head_dim": 64},
        "manager": {"block_tokens": 1},
        "cost": {"kind": "affine", "ns_per_token": 50_000},
        "tiers": [{"kind": "gpu", "blocks": 1 << 20}],
    }
    return open_simulation(config_of(tables, Path()))


class Prober:
    """An attacker with some accounts, on a machine that serves another tenant too.

    Attributes:
        found: secret tokens that it has guessed.
        asked: secret tokens in all.
    """

    def __init__(self, mode: Mode, accounts: int, seed: int) -> None:
        self.found = self.asked = 0
        self._mode, self._accounts = mode, accounts
        self._dice = random.Random(seed)
        self._fresh = count(1 << 20)
        self._sent = count(1)
        # Of each request: tokens found, and minus the time to the first token.
        self._seen: list[tuple[int, int]] = []

    def attack(self, prompts: int) -> None:
        """Guess the secret tokens of some prompts of the tenant."""

        def on_record(record: Record) -> None:
            _, _, arrival, first, _, hits, *_ = record
            self._seen.append((sum(hits), arrival - (first or 0)))

        world().run(self._requests(prompts), on_record)

    def _requests(self, prompts: int) -> Iterator[RowWithMore]:
        for _ in range(prompts):
            text = [self._dice.randrange(1000) for _ in range(SYSTEM)]
            secret = [self._dice.randrange(CANDIDATES) for _ in range(SECRET)]
            yield self._request("victim", [*text, *secret])
            for token in secret:
                before = len(self._seen) + 1
                for candidate in range(CANDIDATES):
                    for account in range(self._accounts):
                        yield self._request(str(account), [*text, candidate])
                # A run asks for the next request when one comes in: the others have ended then.
                yield self._request("nobody", [])
                rows = self._seen[before:]
                each = [rows[at :: self._accounts] for at in range(self._accounts)]
                seen = [tuple(map(sum, zip(*of, strict=True))) for of in zip(*each, strict=True)]
                best = max(seen)
                guess = self._dice.choice([at for at, one in enumerate(seen) if one == best])
                self.found += guess == token
                self.asked += 1
                # Whatever it guessed, it knows the tokens before the next one.
                text.append(token)

    def _request(self, tenant: str, text: Sequence[int]) -> RowWithMore:
        # The last token of a prompt is computed in any case.
        tokens = np.array([*text, next(self._fresh)], dtype=np.uint32)
        whose = scope(self._mode, tenant)
        more: OptionalFields = {} if whose is None else {"scope": whose}
        return next(self._sent) * 1_000_000_000, tokens, len(tokens), 1, None, more


def attacks(prompts: int) -> Iterator[Result]:
    """What probers find of secrets, by how tenants share and the prober's accounts."""
    modes: list[tuple[Mode, int]] = [(("all", None), 1), (("salts", None), 1), (("salts", None), 3)]
    modes += [(("after", k), accounts) for k in AFTER for accounts in range(1, k + 1)]
    chance = 1 / CANDIDATES
    for mode, accounts in modes:
        prober = Prober(mode, accounts, seed=accounts)
        prober.attack(prompts)
        kind, after = mode
        share = prober.found / prober.asked
        closed = kind == "salts" or (after is not None and accounts < after)
        bound = chance + MOST_SIGMAS * (chance * (1 - chance) / prober.asked) ** 0.5
        yield Result(
            what=f"attack: {name_of(mode)}, {accounts} accounts",
            ours=round(share, 4),
            unit="of secret tokens guessed",
            goal=round(bound, 4) if closed else None,
            ok=share <= bound if closed else None,
            more={
                "mode": name_of(mode),
                "accounts": accounts,
                "chance": chance,
                "tokens": prober.asked,
                "better": "below",
            },
        )


def name_of(mode: Mode) -> str:
    """A mode in words."""
    kind, after = mode
    return {"all": "share all", "salts": "salts"}.get(kind, f"share_after={after}")


def chats(trace: Path | None) -> list[TraceRequest]:
    """The conversations of the published trace after eight system prompts; without it, made up."""
    if trace is None:
        return FAMILIES["chats"](requests=300)
    requests = read_trace(trace)
    fresh = 1 + max(int(request.blocks.max()) for request in requests)
    starts = np.cumsum((fresh, *SYSTEMS))
    dice = random.Random(0)
    weights = [1 / rank for rank in range(1, len(SYSTEMS) + 1)]
    chosen: dict[str, int] = {}
    played: list[TraceRequest] = []
    for at, request in enumerate(requests):
        # All prompts begin with block 0; the one after it is the conversation's own.
        session = str(request.blocks[1]) if len(request.blocks) > 1 else f"single {at}"
        if session not in chosen:
            chosen[session] = dice.choices(range(len(SYSTEMS)), weights)[0]
        system = chosen[session]
        front = np.arange(starts[system], starts[system + 1], dtype=np.uint32)
        played.append(
            replace(
                request,
                blocks=np.concatenate([front, request.blocks[1:]]),
                input_tokens=request.input_tokens + 512 * (len(front) - 1),
                session=session,
            )
        )
    return played


def hits(requests: Sequence[TraceRequest]) -> Iterator[Result]:
    """Prompt tokens found by how tenants share, in rooms of several sizes."""
    distinct = len(np.unique(np.concatenate([request.blocks for request in requests])))
    longest = max(len(request.blocks) for request in requests)
    modes: list[Mode] = [("all", None), ("salts", None), *(("after", k) for k in AFTER)]
    for share in SHARES:
        room = max(longest, round(share * distinct))
        found: dict[Mode, float] = {}
        for mode in modes:
            tenants = Tenants() if mode[0] == "all" else Tenants(TENANTS, mode[1])
            played = replay(requests, open_manager([Tier("gpu", blocks=room)]), tenants=tenants)
            found[mode] = played.tokens_hit / played.tokens
            yield Result(
                what=f"hits: {room} blocks, {name_of(mode)}",
                ours=round(found[mode], 4),
                unit="of prompt tokens found",
                more={"room": room, "share": share, "mode": name_of(mode)},
            )
        shared, salted, after = found["all", None], found["salts", None], found["after", 3]
        lost, kept = shared - after, (after - salted) / max(shared - salted, 1e-9)
        for what, ours, goal, ok in (
            ("lost at share_after=3", lost, MOST_LOST, lost <= MOST_LOST),
            ("gain over salts that share_after=3 keeps", kept, LEAST_KEPT, kept >= LEAST_KEPT),
        ):
            yield Result(f"goal: {room} blocks, {what}", round(ours, 4), "", goal=goal, ok=ok)


def main() -> int:
    """Play, report, record."""
    parser = options(__doc__, OUT)
    parser.add_argument("--trace", default=os.environ.get("KVTRIE_TRACE"), metavar="FILE")
    given = parser.parse_args()
    if given.trace is None and not given.quick:
        parser.error("neither --trace nor KVTRIE_TRACE names the trace")
    rows = [*attacks(2 if given.quick else PROMPTS)]
    rows += hits(chats(None if given.quick else Path(str(given.trace))))
    if not keep(given, document(place(), rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
