"""A run's calls, played into a manager alone, give the same moves; predicted runs are replays."""

import random
from dataclasses import replace

import pytest

from kvtrie import (
    BlockManager,
    Cost,
    Demote,
    Lane,
    ModelShape,
    Prefetch,
    Progress,
    Release,
    Tier,
)
from kvtrie.errors import ConfigError, NoSpaceError
from kvtrie.sim.config import SimulationConfig, TraceSource
from kvtrie.sim.figures import figures_of
from kvtrie.sim.replay import open_manager, replay
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.run import open_simulation, play
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations

KINDS = ("gpu", "host", "disk")
STORE = 1  # the kind of a move
POLICIES = ("lru", "fifo", "lfu", "retention", "checkerboard", "learned")


def drawn(dice):
    """Settings and requests of a small run."""
    layers = dice.randint(1, 3)
    slots = dice.random() < 0.2
    tiers = tuple(
        Tier(
            kind,
            blocks=dice.randint(6, 10) * (at + 1),
            owner="none",
            write=dice.choice(("back", "through", "never")),
            free_low=dice.choice((0.0, 0.3)),
            admit_after=dice.choice((1, 1, 2)),
            layer_slots=slots and at == 0,
            read=Lane(f"{kind} read", dice.choice((1e5, 1e7)), dice.choice((0, 999)), shares="a"),
            store=Lane(f"{kind} store", dice.choice((1e5, 1e7)), shares=dice.choice(("a", None))),
        )
        for at, kind in enumerate(KINDS[: dice.randint(1, 3)])
    )
    manager = {
        "machines": dice.randint(1, 3),
        "router": dice.choice(("round-robin", "least-loaded", "hash")),
        "policy": dice.choice(POLICIES),
        "structure": dice.choice(("leaf-only", "leaf-only", "holes")),
        "load": dice.choice(("all", "plan")),
        "wait": dice.choice(("all", "layer")),
        "keep": dice.randint(0, 2),
        "moves_per_job": dice.choice((1, 3, 64)),
        "epsilon": dice.choice((0.0, 1 / 64)),
        "prefetch": dice.choice(("never", "never", "arrival")),
    }
    if dice.random() < 0.5:
        budget = dice.choice((2, 5, 64))
        apart = manager["machines"] > 1 and dice.random() < 0.3
        manager["engine"] = "disaggregated" if apart else "continuous"
        manager["network"] = Lane("peers", dice.choice((1e5, 1e7))) if apart else None
        manager["prefill"] = 1
        manager["token_budget"] = budget
        manager["max_running"] = dice.randint(1, budget)
        manager["token_by_token"] = dice.random() < 0.2
    if len(tiers) > 1 and dice.random() < 0.5:
        manager["peers"] = Lane("peers", dice.choice((1e5, 1e7)), shares=dice.choice(("n", None)))
    # The other dice keep what they drew before there was a shared store.
    more = random.Random(dice.getstate()[1][0])
    if len(tiers) > 1 and more.random() < 0.3:
        shares = more.choice((None, "a", "n"))
        lane = Lane("remote read", more.choice((1e5, 1e7)), more.choice((0, 999)), shares=shares)
        store = replace(lane, name="remote store")
        room = more.randint(3, 40)
        tiers += (Tier("remote", blocks=room, owner="none", policy="lru", read=lane, store=store),)
        manager["remote"] = more.choice(("all", "all", "local"))
    config = SimulationConfig(
        trace=TraceSource("drawn"),
        model=ModelShape(layers, 1, 4, "float16"),
        tiers=tiers,
        price=(dice.choice((0, 10, 1000)) << 32, 1 << 32),
        cost=Cost(alpha=0.01, ns_per_token=1000.0),
        block_tokens=2,
        manager=manager,
    )
    now, chats, requests = 0, [[] for _ in range(4)], []
    for _ in range(20):
        now += dice.choice((0, 10, 30_000))
        chat = dice.randrange(4)
        chats[chat] = chats[chat][: dice.randint(0, 12)] + dice.choices(range(3), k=5)
        session = f"chat {chat}" if dice.random() < 0.5 else None
        last = session is not None and dice.random() < 0.2
        about = {"last": last}
        if session is not None and more.random() < 0.5:
            reports = [(0, more.choice((0, 500, 3000))), (more.randint(1, 1000), 1000)]
            about["tool"] = (now + more.choice((0, 99, 90_000)), reports)
        requests.append((now, chats[chat], len(chats[chat]), dice.randint(0, 3), session, about))
    if len(tiers) == 2:
        hint = more.choice(("progress", "prefetch", "prefetch-now"))
        manager["reports"] = (hint, 0, more.random() < 0.5)
    # The same numbers are times to think where clients wait for answers.
    manager["clients"] = dice.choice((None, None, None, 1, 3))
    return config, requests


def grown(lease, name, rest, load):
    """Play a call that only leases of the continuous engine get."""
    if name == "suspend":
        lease.suspend(rest[0], now=rest[1])
        return
    fits = rest[-2]
    try:
        if name == "reserve":
            lease.reserve(rest[0], now=rest[2])
        else:
            lease.resume(now=rest[1], load=load)
    except NoSpaceError:
        assert not fits
    else:
        assert fits


HINTS = {
    "prefetch": lambda tokens: Prefetch(tokens=tokens),
    "end": lambda session: Release(session=session),
    "progress": lambda session, eta: Progress(session=session, eta=eta),
    "bring": lambda session, deadline: Prefetch(session=session, deadline=deadline),
    "demote": lambda session: Demote(session=session, tier="host"),
}


def from_peers(manager, name, rest):
    """Play a call that only some runs make."""
    if name in HINTS:
        *about, now = rest
        manager.hint([HINTS[name](*about)], now=now)
    elif name == "loads-due":
        manager.hint([], now=rest[0])
    elif name == "mark":
        tokens, tier, skip, first, ready, fits, now = rest
        try:
            manager.mark(tokens, tier, present=True, skip=skip, first=first, ready=ready, now=now)
        except NoSpaceError:
            assert not fits
        else:
            assert fits
    elif name == "clear":
        tokens, tier, skip, fits, now = rest
        try:
            manager.mark(tokens, tier, present=False, skip=skip, now=now)
        except ConfigError:
            assert not fits
        else:
            assert fits
    elif name == "pin":
        assert manager.pin_copies(rest[0], rest[1], now=rest[3]) == rest[2]
    else:
        assert name == "unpin"
        manager.unpin_copies(rest[0], now=rest[1])


def tiers_of_managers(config):
    """The tiers, of which a shared store is as large as what a machine keeps account of."""
    if config.shared is None:
        return config.tiers
    tracked = 2 * sum(tier.blocks for tier in config.tiers)
    return (*config.tiers[:-1], replace(config.shared, blocks=tracked))


def shared_stores(config, rows):
    """Number of stores to a shared store among moves of a log."""
    last = None if config.shared is None else len(config.tiers) - 1
    return sum(row[1] == STORE and row[4] == last for row in rows)


def moves_of_manager(config, log):
    """Play a log into a new manager, which must hand out the log's moves."""
    given = ("policy", "structure", "epsilon")
    manager = BlockManager(
        config.model,
        tiers_of_managers(config),
        block_tokens=config.block_tokens,
        cost=config.cost,
        **{name: config.manager[name] for name in given},
    )
    leases, count = {}, 0
    names = ("id", "kind", "lease", "src", "dst", "src_slot", "dst_slot", "layer_lo", "layer_hi")
    for name, *rest in log:
        if name == "acquire":
            tokens, keep, reserve, layerwise, session, number, now = rest
            ask = {"keep": keep, "reserve": reserve, "layerwise": layerwise, "session": session}
            try:
                lease = manager.acquire(tokens, now=now, load=config.manager["load"], **ask)
            except NoSpaceError:
                assert number == 0
            else:
                assert lease.id == number
                leases[number] = lease
        elif name == "moves":
            moves = manager.moves(shared=shared_stores(config, rest[0]))
            rows = zip(*(getattr(moves, one).tolist() for one in (*names, "after")), strict=True)
            assert list(rows) == rest[0]
            count += len(moves)
        elif name == "complete":
            manager.complete(rest[0], now=rest[1])
        elif name == "commit":
            leases[rest[0]].commit(rest[1], now=rest[2])
        elif name == "release":
            leases.pop(rest[0]).release(now=rest[1])
        elif name in {"reserve", "suspend", "resume"}:
            grown(leases[rest[0]], name, rest[1:], config.manager["load"])
        else:
            from_peers(manager, name, rest)
    assert not len(manager.moves(shared=0))
    manager.audit()
    return count


def same_moves(seeds):
    """Number of moves in the runs of some seeds."""
    moves = 0
    for seed in seeds:
        config, requests = drawn(random.Random(seed))
        simulation = open_simulation(config, logged=True)
        assert play(config, simulation, requests).requests == len(requests)
        for machine in range(config.manager["machines"]):
            moves += moves_of_manager(config, simulation.log(machine))
    return moves


@pytest.mark.slow
def test_a_separate_manager_hands_out_the_same_moves():
    assert same_moves(range(1000)) > 10_000


@pytest.mark.deep
def test_a_separate_manager_hands_out_the_same_moves_in_many_runs():
    assert same_moves(range(1000, 11_000)) > 100_000


def test_equal_runs_report_equal_lines():
    config, requests = drawn(random.Random(7))
    lines_of_runs = [[], []]
    for lines in lines_of_runs:
        play(config, open_simulation(config), requests, lines.append)
    assert lines_of_runs[0] == lines_of_runs[1]
    assert [line["id"] for line in lines_of_runs[0]] == list(range(len(requests)))


@pytest.mark.parametrize("policy", ["lru", "retention", "fifo"])
@pytest.mark.parametrize("load", ["all", "plan"])
def test_a_predicted_run_is_a_replay(tmp_path, policy, load):
    trace = conversations(seed=7, chats=60, turns=5, active=12)
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    tiers = (
        Tier("gpu", blocks=60, owner="none"),
        Tier("host", blocks=100, owner="none"),
        Tier("disk", blocks=300, owner="none"),
    )
    manager = open_manager(tiers, policy=policy)
    source = TraceSource(path, "mooncake", output=False)
    config = SimulationConfig(
        trace=source,
        model=manager.model,
        tiers=tiers,
        price=(0, 0),
        cost="default",
        block_tokens=512,
        manager={"policy": policy, "load": load, "keep": 0, "transfer": "predicted"},
    )
    simulation = open_simulation(config)
    counts = play(config, simulation, trace_requests(source, 512))
    figures = figures_of(config, simulation, counts)
    from kvtrie.sim.trace import read_trace

    played = replay(read_trace(path), manager, load=load)
    names = ("kind", "blocks", "hits", "clean", "demoted", "dropped")
    seen = [{name: tier[name] for name in names} for tier in figures["tiers"]]
    assert seen == [{name: getattr(t, name) for name in names} for t in played.tiers]
    assert figures["requests"] == played.requests
    assert figures["refused"] == played.refused
    assert figures["input_tokens"] == played.tokens
    assert sum(figures["hit_tokens"].values()) == played.tokens_hit
    assert figures["stalled_ns"] / 1e9 == played.waited_s
    assert played.waited_s > 0
