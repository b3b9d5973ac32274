"""A simulation of three requests whose figures are worked out by hand."""

import json

from kvtrie.cli import main

A = list(range(64))
B = list(range(100, 164))
SECOND = 10**9
SETTINGS = """
seed = 0
machines = 1
trace = {path="t.jsonl", format="tokens"}
model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}
manager = {block_tokens=16, policy="lru", load="all", keep=1}
engine = {kind="serial", wait="all"}
cost = {kind="affine", ns_per_token=1000, alpha=0.0}
router = {kind="round-robin"}
tiers = [
  {kind="gpu", blocks=4, write="through"},
  {kind="host", blocks=64, read={bytes_per_s=16384000, latency_ns=0}, \
store={bytes_per_s=16384000, latency_ns=0}},
]
"""


def write(folder, *requests, settings=SETTINGS):
    """The settings with a trace of `(seconds, tokens)`."""
    rows = ({"arrival_ns": int(at * SECOND), "tokens": t, "output_tokens": 1} for at, t in requests)
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "sim.toml"
    path.write_text(settings)
    return path


def play(config, capsys, *changes):
    """The figures of a run and its lines."""
    lines = config.with_name("lines.jsonl")
    options = [word for change in changes for word in ("--set", change)]
    assert main(["sim", "run", str(config), "--json", "--requests", str(lines), *options]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    return json.loads(capsys.readouterr().out), rows
