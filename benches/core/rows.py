"""The rows of the table, and what is played for them; their goals stand in `goals`.

A game is one benchmark of ours, under the default policy unless a row names another one, and the
same of each peer, played in turn. Every figure is a cost:
less is better, so peer / ours is how many times ours is better. Invariant: `Row.what` is the name
that ours prints, and no two rows share it. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

OURS = "kvtrie"


@dataclass(frozen=True, slots=True)
class Play:
    """One driver's run, in the interpreter of that environment.

    Attributes:
        environment: `kvtrie` for ours, else the peer that `setup.sh` installs.
        module: the driver.
        arguments: of the driver.
    """

    environment: str
    module: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, times the number of peers that have it.

    Attributes:
        what: its name in ours' lines.
        label: what people read.
        unit: of all figures.
        peer: its name in the peers' lines, if it is another one.
        less: another of ours' figures that is taken away first.
        also: another of ours' rows that it is compared with, as with a peer.
    """

    what: str
    label: str
    unit: str
    peer: str | None = None
    less: str | None = None
    also: str | None = None


@dataclass(frozen=True, slots=True)
class Game:
    """Drivers that are run in turn, and the rows of their figures.

    Attributes:
        name: short.
        ours: our drivers.
        peers: theirs.
        rows: in the table's order.
        once: memory does not wobble, and criterion repeats its samples itself.
    """

    name: str
    ours: tuple[Play, ...]
    peers: tuple[Play, ...]
    rows: tuple[Row, ...]
    once: bool = False


def _mine(module: str, *arguments: str) -> Play:
    return Play(OURS, f"benches.ours.{module}", arguments)


def _sglang(what: str, tree: str) -> Play:
    return Play("sglang", "benches.peers.sglang_tree", (what, "--tree", tree))


def _vllm(what: str) -> Play:
    return Play("vllm", "benches.peers.vllm_blocks", (what,))


def _dynamo(per_call: int) -> Play:
    return Play("dynamo", "benches.peers.dynamo_tree", ("--per-call", str(per_call)))


_REQUEST = Game(
    "request",
    (
        _mine("request", "--policy", "lru"),
        _mine("request", "--policy", "retention"),
        _mine("request"),
    ),
    (_sglang("request", "rust"), _sglang("request", "radix"), _vllm("request")),
    (
        Row("request", "whole manager, per request", "us", also="request.retention"),
        Row("request.acquire", "  of it acquire", "us"),
        Row("request.commit_prompt", "  of it commit of the prompt", "us"),
        Row("request.commit_answer", "  of it commit of the answer", "us"),
        Row("request.release", "  of it release", "us"),
        # The peers' policy.
        Row("request.lru", "the same with policy lru", "us", peer="request"),
        Row("request.retention", "the same with policy retention", "us", peer="request"),
        Row("lookup.mean", "longest prefix in that trace, mean", "us"),
        Row("lookup.p99", "longest prefix in that trace, p99", "us"),
    ),
)

_FAST = ("learned", "lru", "fifo", "lfu", "flat", "retention")
_OTHER = ("weighted", "checkerboard", "restore")  # played alone

_EVICT = Game(
    "evict",
    (
        *(_mine("leaves", "--policy", policy) for policy in _FAST),
        *(_mine("leaves", "--policy", policy, "--steps", "300") for policy in _OTHER),
    ),
    (_vllm("leaves"), _sglang("leaves", "rust"), _sglang("leaves", "radix")),
    (
        # The peers evict by LRU alone.
        *(
            Row(f"evict.{policy}", f"evict 4, insert 4, {policy}", "us", peer="evict")
            for policy in _FAST
        ),
        *(Row(f"evict.{policy}", f"evict 4, insert 4, {policy}", "us") for policy in _OTHER),
    ),
)

_DECODE = Game(
    "decode",
    (_mine("decode"),),
    (_vllm("decode"),),
    (Row("decode", "one token of one request, 64 a call", "us"),),
)

_KINDS = ("", ".int32", ".int64", ".list")
_FIND = ("miss", "10", "100", "1000")

_STORE = Game(
    "store",
    (_mine("store"),),
    (_dynamo(16), _dynamo(100)),
    (
        Row("store.16", "mark runs of 16 blocks, per block", "ns"),
        Row("store.100", "mark runs of 100 blocks, per block", "ns"),
        *(
            Row(
                f"find.{length}{kind}",
                f"longest prefix, {length}, {kind[1:] or 'uint32'}",
                "us",
                peer=f"find.{length}",
            )
            for length in _FIND
            for kind in _KINDS
        ),
    ),
)

_VICTIM = Game(
    "victim",
    (_mine("rust", "victim"), _mine("rust", "runs")),
    (),
    (
        Row("victim.one", "exact victim of a million, alone", "us"),
        Row("victim.run", "exact victim of a million, in leaf runs of 30", "us"),
        Row("victim.newcomer", "exact victim of a million, and a newcomer", "us"),
        Row("victim.one.default", "  with costs rounded by 1/64, alone", "us"),
        Row("victim.run.default", "  with costs rounded by 1/64, in leaf runs of 30", "us"),
        Row("victim.newcomer.default", "  with costs rounded by 1/64, and a newcomer", "us"),
    ),
    once=True,
)

_MEMORY = Game(
    "memory",
    (
        *(_mine("memory", what) for what in ("1", "2", "3", "sequences")),
        *(_mine("memory", "1", "--policy", policy) for policy in ("lru", "retention")),
    ),
    (_sglang("memory", "rust"), _vllm("memory"), _dynamo(16)),
    (
        Row("memory.tiers_1", "memory of a block at a million", "B", peer="memory"),
        Row("memory.tiers_2", "  more for a second tier", "B", less="memory.tiers_1"),
        Row("memory.tiers_3", "  more for a third tier", "B", less="memory.tiers_2"),
        Row("memory.lru", "  with policy lru, one tier", "B", peer="memory"),
        Row("memory.retention", "  with policy retention, one tier", "B", peer="memory"),
        Row("memory.sequences_4", "  in sequences of 4 blocks", "B"),
        Row("memory.sequences_1", "  in sequences of 1 block", "B"),
    ),
    once=True,
)

_OFFLOAD = Game(
    "offload",
    (_mine("offload"),),
    (
        Play("vllm", "benches.peers.vllm_offload", ("--policy", "lru")),
        Play("vllm", "benches.peers.vllm_offload", ("--policy", "arc")),
    ),
    (Row("offload", "host tier below gpu, per request", "us"),),
)

_PLAN = Game(
    "plan",
    (_mine("rust", "plan"),),
    (),
    (
        Row("plan.eighth", "plan of 256 blocks, every 8th a hole", "us"),
        Row("plan.third", "plan of 256 blocks, every 3rd a hole", "us"),
    ),
    once=True,
)

GAMES = (_REQUEST, _EVICT, _DECODE, _STORE, _VICTIM, _MEMORY, _OFFLOAD, _PLAN)


def chosen(prefixes: list[str]) -> list[Game]:
    """The games with the rows whose names begin so; all of them if none is asked for."""
    if not prefixes:
        return list(GAMES)
    games = [
        Game(
            game.name,
            game.ours,
            game.peers,
            tuple(row for row in game.rows if row.what.startswith(tuple(prefixes))),
            game.once,
        )
        for game in GAMES
    ]
    return [game for game in games if game.rows]


_SMALL = {
    "request": "--conversations 60 --blocks 20000",
    "leaves": "--leaves 40 --steps 5",
    "decode": "--requests 3 --steps 40 --prompt 100",
    "store": "--blocks 2000 --calls 3",
    "memory": "--blocks 3000 --conversations 60",
    "offload": "--conversations 80 --gpu 14000 --blocks 15000",
}
"""Arguments of our drivers under `--quick`; criterion's benches are left out."""


def quick(game: Game) -> Game:
    """The game on small sizes, without peers."""
    names = {play: play.module.rpartition(".")[2] for play in game.ours}
    ours = [
        replace(play, arguments=(*play.arguments, *_SMALL[name].split()))
        for play, name in names.items()
        if name in _SMALL
    ]
    return replace(game, ours=tuple(ours), peers=())
