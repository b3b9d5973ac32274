"""Sessions of a trace: their tenants, their ends, and what tools report between their requests."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvtrie import ConfigError, Lane, Tier
from kvtrie.sim.config import config_of
from kvtrie.sim.run import open_simulation, run_config
from kvtrie.sim.sessions import Reports, Tenants, last_ones, with_sessions

SECOND = 10**9
ROWS = [(at * SECOND, [at], 1, 1, session) for at, session in enumerate(["a", None, "b", "a", "b"])]


def about(rows=ROWS, **more):
    given = {"ends": False, "reports": Reports(), "tenants": Tenants(), "seed": 0, **more}
    return [row[5] for row in with_sessions(iter(rows), iter(rows), **given)]


LIKE = {"format": "sharegpt-like", "requests": 60}


def settings(made=LIKE, block=16, **trace):
    tables = {
        "trace": {**made, **trace},
        "model": {"layers": 4, "kv_heads": 1, "head_dim": 64},
        "manager": {"block_tokens": block},
        "cost": {"kind": "affine", "ns_per_token": 1000},
        "tiers": [{"kind": kind, "blocks": 40, "write": "through"} for kind in ("gpu", "host")],
    }
    return config_of(tables, Path())


def test_the_last_request_of_each_session_ends_it():
    assert last_ones(row[4] for row in ROWS) == {3, 4}
    assert [more["last"] for more in about(ends=True)] == [False, False, False, True, True]
    assert not any(more["last"] for more in about())


def test_a_tool_runs_until_the_next_request_of_its_session():
    tools = [more.get("tool") for more in about(reports=Reports(4, error=0))]
    assert tools[1] is tools[3] is tools[4] is None
    assert [tool[0] for tool in (tools[0], tools[2])] == [3 * SECOND, 4 * SECOND]
    assert tools[0][1] == [(0, 1000), (250, 1000), (500, 1000), (750, 1000)]


def test_reports_err_by_a_factor_whose_logarithm_is_normal():
    rng = random.Random(3)
    logs = [math.log(said / 1000) for _ in range(2000) for _, said in Reports(2, 0.5).of(rng)]
    mean = sum(logs) / len(logs)
    deviation = (sum((log - mean) ** 2 for log in logs) / len(logs)) ** 0.5
    assert abs(mean) < 0.03
    assert abs(deviation - 0.5) < 0.03


def test_tools_report_to_the_manager_that_served_their_session():
    config = settings(reports={"number": 3, "error": 0.2})
    simulation = open_simulation(config, logged=True)
    run_config(config, simulation=simulation)
    calls = simulation.log(0)
    said = [call for call in calls if call[0] == "progress"]
    waits = {}
    for name, *rest in calls:
        if name == "acquire":
            waits[rest[4]] = 0
        elif name == "progress":
            waits[rest[0]] += 1
            assert waits[rest[0]] <= 3
    assert len(said) > 60
    assert len(said) % 3 == 0


def paused(hint):
    """Calls and figures of chats whose blocks are on disk while a tool runs."""
    config = settings(
        reports={"number": 2, "error": 0, "hint": hint, "tier": "host", "demote": True}
    )
    gpu, host = config.tiers
    disk = Tier("disk", blocks=4000, owner="none", read=Lane("disk read", 1e8))
    tiers = (replace(gpu, blocks=200), replace(host, blocks=150), disk)
    simulation = open_simulation(replace(config, tiers=tiers), logged=True)
    figures = run_config(replace(config, tiers=tiers), simulation=simulation)
    return simulation.log(0), figures


def test_blocks_that_are_prefetched_late_are_found_and_held_for_a_shorter_time():
    held, found = {}, {}
    for hint in ("prefetch-now", "progress", "prefetch"):
        calls, figures = paused(hint)
        names = [call[0] for call in calls]
        assert names.count("demote") > 20
        assert ("loads-due" in names) == (hint != "prefetch-now")
        bring = [call for call in calls if call[0] == "bring"]
        assert all((call[2] is None) == (hint == "prefetch-now") for call in bring)
        held[hint] = figures["tiers"][1]["prefetched_byte_s"]
        found[hint] = figures["hit_tokens"]["host"]
    assert 0 < 2 * held["prefetch"] < held["progress"] < held["prefetch-now"]
    assert found["prefetch"] > found["prefetch-now"]


def test_reports_name_a_tier_that_is_there():
    config = settings(reports={"number": 1, "tier": "disk"})
    with pytest.raises(ConfigError, match=r"reports\.tier is 'disk', one of gpu, host wanted"):
        run_config(config)


def test_sessions_keep_their_tenant_and_requests_without_one_are_drawn():
    rows = [(at, [at], 1, 1, f"s{at % 400}") for at in range(800)]
    scopes = [more["scope"] for more in about(rows, tenants=Tenants(4))]
    assert scopes[:400] == scopes[400:]
    counts = [sum(scope.tenant == b"%d" % tenant for scope in scopes) for tenant in range(4)]
    assert sum(counts) == 800
    assert min(counts) > 140
    alone = about([(at, [at], 1, 1, None) for at in range(50)], tenants=Tenants(4))
    assert len({more["scope"].tenant for more in alone}) == 4
    assert all("scope" not in more for more in about(rows))


def test_tenants_without_sharing_find_only_their_own():
    chats = {"format": "chats", "requests": 200}
    shared = run_config(settings(chats, 512))
    salted = run_config(settings(chats, 512, tenants={"number": 20}))
    after = run_config(settings(chats, 512, tenants={"number": 20, "share_after": 2}))
    found = [sum(one["hit_tokens"].values()) for one in (salted, after, shared)]
    assert 0 < found[0] < found[1] < found[2]


def test_tenants_need_a_single_machine():
    config = settings(tenants={"number": 2})
    config = replace(config, manager={**config.manager, "machines": 2})
    with pytest.raises(ConfigError, match="request 0 has a scope, with 2 machines"):
        run_config(config)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Tenants(-1), "number is -1"),
        (lambda: Tenants(0, 3), "share_after is 3 without tenants"),
        (lambda: Tenants(5, 1), "share_after is 1"),
        (lambda: Reports(101), "number is 101"),
        (lambda: Reports(1, -1), "error is -1"),
        (lambda: settings(reports={"number": 1}, arrivals={"kind": "closed"}), "1 clients"),
        (lambda: settings(reports={"often": 1}), "often"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, part):
    with pytest.raises(ConfigError, match=part):
        make()
