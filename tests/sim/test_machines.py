"""Machines that differ, what they share with the network, and what several of them cannot have."""

import json

import pytest
from hand_run import A, B, write

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.config import read_config
from kvtrie.sim.run import open_simulation, run_config

C = list(range(200, 264))
LANES = "read={bytes_per_s=16384000, latency_ns=0}, store={bytes_per_s=16384000, latency_ns=0}"
HOST = f'{{kind="host", blocks=64, {LANES}}}'
LARGE = (
    f'{{tiers=[{{kind="gpu", blocks=8, write="through"}}, {HOST}], '
    "cost={ns_per_token=500, alpha=0.0}, price={gpu_hour=5.0}}"
)
REMOTE = '[{kind="gpu", blocks=4}, {kind="host", blocks=4}, {kind="remote", blocks=9}]'
PEERS = 'peers={lookup="all", bytes_per_s=16384000, latency_ns=0'


def play(config, *changes):
    lines = []
    figures = run_config(read_config(config, changes), lines.append)
    return figures, [line["first_token_ns"] - line["arrival_ns"] for line in lines]


def refused(config, *changes):
    with pytest.raises(ConfigError) as error:
        open_simulation(read_config(config, changes))
    return str(error.value)


def test_each_machine_has_its_own_tiers_cost_and_price(tmp_path):
    config = write(tmp_path, (0, A), (0, A), (1, B), (1, B), (2, A), (2, A))
    figures, waits = play(config, f"machines=[{{}}, {LARGE}]", "price.gpu_hour=2.0")
    # The first machine loads three blocks in 3 ms and computes 16 tokens; the second one has them.
    assert waits == [64_000, 32_000, 64_000, 32_000, 3_016_000, 8_000]
    assert [(tier["kind"], tier["blocks"]) for tier in figures["tiers"]] == [
        ("gpu", 6),
        ("host", 64),
    ]
    assert figures["cost"]["per_hour"] == 7.0
    assert figures["hit_tokens"]["gpu"] == figures["hit_tokens"]["host"] == 48
    found = read_config(config, [f"machines=[{{count=2}}, {LARGE}]"])
    assert found.rooms() == [16, 192]
    assert found.room_bytes() == (16 + 192) << 14
    assert [(one.count, one.tiers[0].blocks) for one in found.machines] == [(2, 4), (1, 8)]
    assert found.manager["machines"] == 3


def test_machines_in_one_table_are_alike(tmp_path):
    config = write(tmp_path, (0, A), (0, B), (1, A), (1, B))
    assert play(config, "machines=[{count=2}]") == play(config, "machines=2")
    assert read_config(config, ["machines=[{count=2}]"]).machines == ()


def test_a_setting_of_one_machine_is_changed_by_its_place(tmp_path):
    config = write(tmp_path, (0, A))
    change = "machines.1.tiers.0.blocks=5"
    found = read_config(config, [f"machines=[{{}}, {LARGE}]", change])
    assert [one.tiers[0].blocks for one in found.machines] == [4, 5]


@pytest.mark.parametrize(
    ("shares", "last"), [("nic", [9_016_000, 5_016_000]), ("other", [6_016_000, 3_016_000])]
)
def test_a_tier_and_the_network_contend_for_a_lane_of_one_name(tmp_path, shares, last):
    """The second machine fetches A at 2 s; the first one loads A from its host 1 ms later."""
    config = write(tmp_path, (0, A), (0, B), (1, C), (2, A), (2.001, A))
    changes = ("machines=2", f'{PEERS}, shares="{shares}"}}', "tiers.1.read.shares=nic")
    figures, waits = play(config, *changes)
    assert waits[3:] == last
    assert figures["lanes"]["host read"]["waited_ns"] == (5_000_000 if shares == "nic" else 0)
    if shares == "nic":
        assert "predicted moves do not wait" in refused(config, *changes, "transfer=predicted")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (['machines="2"'], "machines is '2', a whole number 1 to 1048576 wanted"),
        (["machines=[]"], "machines is [], a number or tables of at least one machine wanted"),
        (["machines=[5]"], "machines.0 is 5, a table wanted"),
        (["machines=[{count=0}]"], "machines.0.count is 0, 1 to 1048576 wanted"),
        (["machines=[{count=1048576}, {}]"], "machines is 1048577, 1 to 1048576 wanted"),
        (["machines=[{blocks=5}]"], "machines.0.blocks is 5, but there is no such key"),
        (["machines=[{tiers=[]}]"], "machines.0.tiers is (), one to four wanted"),
        (["machines=[{cost={kind=1}}]"], "machines.0.cost.kind is one of"),
        (
            ['machines=[{}, {tiers=[{kind="gpu", blocks=4}]}]'],
            "machines.1.tiers are gpu: the kinds and layouts of the first machine, gpu, host, want",
        ),
        (
            ["machines=2", f"tiers={REMOTE}"],
            "machines is 2, and a tier is 'remote', which belongs to one machine: 1 machine, or",
        ),
    ],
)  # fmt: skip
def test_machines_that_cannot_be_are_refused(tmp_path, changes, message):
    assert message in refused(write(tmp_path, (0, A)), *changes)


def test_one_machine_may_have_a_remote_tier(tmp_path):
    config = write(tmp_path, (0, A), (1, B), (2, A))
    assert play(config, f"tiers={REMOTE}")[0]["requests"] == 3


def test_keys_to_fit_are_named_where_machines_differ(tmp_path, capsys):
    config = write(tmp_path, (0, A), (0, B))
    row = {"arrival_ns": 0, "first_token_ns": 64_000, "end_ns": 64_000}
    (tmp_path / "seen.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    words = ["sim", "calibrate", str(config), "--seen", str(tmp_path / "seen.jsonl")]
    assert main([*words, "--set", f"machines=[{{}}, {LARGE}]"]) == 2
    assert (
        "machines are 2 of different hardware: name the keys with --fit" in capsys.readouterr().err
    )
