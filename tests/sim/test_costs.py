"""Step times: profiles and rooflines, by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvtrie import ModelShape
from kvtrie.errors import ConfigError
from kvtrie.sim.config import read_config
from kvtrie.sim.passes import Passes, read_passes
from kvtrie.sim.roofline import DEVICES, Roofline
from kvtrie.sim.run import run_config

SETTINGS = """
trace = {path="t.jsonl"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
manager = {policy="lru"}
tiers = [{kind="gpu", blocks=400}]
"""
PROFILE = """
model = "tiny"

[passes]
contexts = [0, 100]
tokens = [1, 16]
ns = [[1000, 2500], [1200, 4500]]
"""
DECODE = """
[decode]
contexts = [0, 100]
requests = [1, 4]
ns = [[1000, 1600], [1300, 2800]]
"""
LLAMA = ModelShape(
    layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", query_heads=32, hidden=4096
)
ROOF = Roofline(8.03e9, device="H100", flops_efficiency=0.5, memory_efficiency=0.5)


def config(folder, cost, *requests, changes=()):
    rows = ({"arrival_ns": at, "tokens": [at] * n, "output_tokens": out} for at, n, out in requests)
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "sim.toml"
    path.write_text(SETTINGS)
    return read_config(path, [f"cost={cost}", *changes])


def waits(settings):
    lines = []
    run_config(settings, lines.append)
    return [
        (line["first_token_ns"] - line["arrival_ns"], line["end_ns"] - line["first_token_ns"])
        for line in lines
    ]


@pytest.mark.parametrize(("decode", "last"), [("", 6 * 200), (DECODE, 6 * 300)])
def test_a_profile_prices_passes_of_its_sizes(tmp_path, decode, last):
    (tmp_path / "kvtrie.toml").write_text(PROFILE + decode)
    settings = config(tmp_path, '{kind="profile", path="kvtrie.toml"}', (5, 16, 1), (10**6, 100, 7))
    (first, _), (second, answer) = waits(settings)
    assert first == 2500
    # Passes of 16 tokens after 0, 16, ... 80, and of 4 after 96, in one step.
    beyond = [1500 + 2000 * at / 100 for at in range(0, 96, 16)]
    row = [0, 1500], [200, 3500]
    ends = [low + (high - low) * 3 / 15 for low, high in row]
    beyond.append(ends[0] + (ends[1] - ends[0]) * 0.96)
    assert second == pytest.approx(1000 + sum(beyond), abs=1)
    # Six more tokens after 100 to 105.
    slope = last / 6 / 100
    assert answer == pytest.approx(6 * 1000 + last + slope * sum(range(6)), abs=1)


def test_a_request_takes_time_outside_of_steps(tmp_path):
    (tmp_path / "kvtrie.toml").write_text(PROFILE + "[server]\nrequest_ns = 700\n")
    cost = '{kind="profile", path="kvtrie.toml"}'
    requests = [(0, 16, 1), (100, 16, 3)]
    for kind in ("serial", "continuous"):
        engine = f'engine={{kind="{kind}"}}'
        settings = config(tmp_path, cost, *requests, changes=[engine])
        with_time = waits(settings)
        base, prefill, decode, request = settings.price
        assert request == 700
        without = waits(replace(settings, price=(base, prefill, decode, 0)))
        # Its answer is not slower, and no other request waits for it.
        assert with_time == [(first + 700, answer) for first, answer in without]


@pytest.mark.parametrize("given", ["-1", "nan", "'much'", "1e300"])
def test_a_time_outside_of_steps_that_cannot_be_is_refused(tmp_path, given):
    (tmp_path / "kvtrie.toml").write_text(PROFILE + f"[server]\nrequest_ns = {given}\n")
    with pytest.raises(ConfigError, match=r"kvtrie\.toml.*outside of steps"):
        read_passes(tmp_path / "kvtrie.toml")


def test_requests_that_decode_together_share_a_step(tmp_path):
    (tmp_path / "kvtrie.toml").write_text(PROFILE + DECODE)
    cost = '{kind="profile", path="kvtrie.toml"}'
    requests = [(0, 16, 50)] * 4
    together = config(tmp_path, cost, *requests, changes=['engine={kind="continuous"}'])
    serial = config(tmp_path, cost, *requests)
    assert max(answer for _, answer in waits(together)) < 60 * 2800
    assert sum(answer for _, answer in waits(serial)) > 4 * 49 * 1000


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("[passes]", "[runs]", "no profile of `kvtrie profile` with a model: KeyError"),
        ("tokens = [1, 16]", "tokens = [16, 1]", "must ascend"),
        ("tokens = [1, 16]", "tokens = [1, 16, 17]", r"times \(2, 2\) of steps"),
        ("[[1000, 2500]", "[[1000, -1]", "0 to .* ns wanted"),
        ("[[1000, 2500]", "[[1000, nan]", "0 to .* ns wanted"),
        ("requests = [1, 4]", "requests = [2, 4]", "decode.requests begins with"),
        ("[[1000, 1600]", "[[1000]", "no profile"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path, was, now, message):
    path = tmp_path / "kvtrie.toml"
    path.write_text((PROFILE + DECODE).replace(was, now))
    with pytest.raises(ConfigError, match=message):
        read_passes(path)


LANES = """
[lanes."host read"]
bytes_per_s = 16384000
latency_ns = 7
spread = 0.1

[lanes."host store"]
bytes_per_s = 8192000
"""


def test_tiers_that_state_no_lane_have_those_of_a_profile(tmp_path):
    (tmp_path / "kvtrie.toml").write_text(PROFILE + LANES)
    tiers = 'tiers=[{kind="gpu", blocks=4}, {kind="host", blocks=9, store={bytes_per_s=3}}]'
    changes = (tiers, 'lanes.path="kvtrie.toml"')
    found = config(tmp_path, '{kind="affine"}', (0, 16, 1), changes=changes).tiers
    read, store = found[1].lanes()
    assert (read.name, read.bytes_per_s, read.latency_ns) == ("host read", 16_384_000, 7)
    assert store.bytes_per_s == 3
    assert found[0].lanes()[0].bytes_per_s > 1e9


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("[lanes", "[ways", "kvtrie.toml has no lanes"),
        ("bytes_per_s = 8192000", "bytes_per_s = 0", r"lanes.host store: bytes_per_s .* is 0"),
        ("bytes_per_s = 8192000", "", "lanes.host store lacks a key: .*bytes_per_s"),
    ],
)
def test_lanes_that_cannot_be_are_refused(tmp_path, was, now, message):
    (tmp_path / "kvtrie.toml").write_text(LANES.replace(was, now))
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, '{kind="affine"}', (0, 16, 1), changes=('lanes.path="kvtrie.toml"',))


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ('{kind="profile", path="none.toml"}', "cannot read the profile none.toml"),
        ('{kind="profile"}', "cost.path is None"),
        ('{kind="roofline"}', "cost lacks a key: .*parameters"),
        ('{kind="roofline", parameters=8e9, device="H900"}', "cost: device is one of A100, H100"),
        ('{kind="roofline", parameters=8e9, flops_efficiency=2}', "cost: flops_efficiency is 2"),
        ('{kind="roofline", parameters=8e9, speed=2}', "cost.speed is 2, but there is no such key"),
    ],
)
def test_a_cost_that_cannot_be_is_refused(tmp_path, cost, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, cost, (0, 16, 1))


def test_noise_that_falls_is_raised():
    axis = [1, 2]
    falls = np.array([[5.0, 3.0], [4.0, 9.0]])
    assert Passes.of(1, ([0, 9], axis, falls), ([0, 9], axis, falls)).prefill == (
        [0, 9],
        [1, 2],
        [[4, 4], [4, 8]],
    )


def at(grid, context, count):
    contexts, counts, rows = grid
    return rows[contexts.index(context)][counts.index(count)]


def test_a_roofline_is_its_formula():
    passes = ROOF.passes(LLAMA)
    read = 8.03e9 * 2 / (3.35e12 * 0.5) * 1e9
    assert passes.base == round(read)
    # 4096 tokens without context: arithmetic decides.
    flops = 2 * 8.03e9 * 4096 + 4 * 32 * 32 * 128 * 4096 * 4097 / 2
    computing = flops / (989.4e12 * 0.5) * 1e9
    assert passes.base + at(passes.prefill, 0, 4096) == pytest.approx(computing, rel=1e-6)
    # One token for each of 64 requests after 8192: memory decides.
    cached = 64 * 8193 * LLAMA.block_bytes(1) / (3.35e12 * 0.5) * 1e9
    assert at(passes.decode, 8192, 64) == pytest.approx(cached, rel=1e-6)
    assert passes.cost().ns_per_token > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_faster_device_is_no_slower(device):
    ours, slowest = (Roofline(70e9, device=name).passes(LLAMA) for name in (device, "A100"))
    assert ours.base <= slowest.base
    for grid, other in ((ours.prefill, slowest.prefill), (ours.decode, slowest.decode)):
        assert (ours.base + np.array(grid[2]) <= slowest.base + np.array(other[2])).all()


def test_efficiencies_ranks_and_experts_change_what_they_should():
    half = Roofline(8.03e9, flops_efficiency=0.5, memory_efficiency=0.25).passes(LLAMA)
    assert half.base == pytest.approx(2 * ROOF.passes(LLAMA).base, abs=1)
    own = Roofline(8.03e9, flops_per_s=1e15, bytes_per_s=1e12, memory_efficiency=1.0)
    assert own.passes(LLAMA).base == round(16.06e9 / 1e12 * 1e9)
    sparse = Roofline(30e9, active_parameters=3e9).passes(LLAMA)
    dense = Roofline(30e9).passes(LLAMA)
    assert sparse.base == dense.base
    assert at(sparse.prefill, 0, 8192) < at(dense.prefill, 0, 8192) / 5


def test_a_roofline_is_a_cost_of_the_simulator(tmp_path):
    cost = '{kind="roofline", parameters=8e9, device="H200", overhead_ns=5000}'
    settings = config(tmp_path, cost, (0, 4096, 1), (10**9, 64, 11))
    (prefill, _), (_, answer) = waits(settings)
    base = 16e9 / (4.8e12 * 0.8) * 1e9 + 5000
    assert prefill > 4096 * 16e9 / (989.4e12 * 0.6) * 1e9
    assert answer == pytest.approx(10 * base, rel=0.001)
