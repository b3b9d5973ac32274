"""`sim.requests`: every format becomes requests, for replays and for simulations."""

import json

import pytest
from trace_files import AZURE, BURST, CHATS, rows, write

from kvtrie.cli import main
from kvtrie.sim.config import TraceSource
from kvtrie.sim.requests import block_requests, trace_requests


def test_replays_name_blocks_of_tokens(tmp_path):
    same = {"arrival_ns": 0, "tokens": [1, 2, 3, 4, 5]}
    other = {"arrival_ns": 1, "tokens": [1, 2, 9, 3, 4]}
    last = {"arrival_ns": 3, "tokens": [3, 4]}
    path = rows(tmp_path, same, other, {**same, "arrival_ns": 2}, last)
    found = [each.blocks.tolist() for each in block_requests(TraceSource(path), 2)]
    assert found == [[0, 1, 2], [0, 3, 4], [0, 1, 2], [5]]


@pytest.mark.parametrize(
    ("kind", "text", "hits"),
    [
        ("tokens", '{"arrival_ns": 0, "tokens": [1, 2, 3, 4]}\n' * 2, 2),
        ("azure", AZURE, 0),
        ("burstgpt", BURST, 20),
        ("sharegpt", json.dumps(CHATS), 2),
    ],
)
def test_replay_and_sim_read_all_formats(tmp_path, capsys, kind, text, hits):
    path = write(tmp_path, text + "oops\n" if kind != "sharegpt" else text)
    command = ["replay", str(path), "--format", kind, "--block-tokens", "2", "--lenient", "--json"]
    # The bad line is more than a tenth of the file.
    left_out = kind != "sharegpt"
    assert main([*command, "--tier", "gpu=1000"]) == left_out
    figures = json.loads(capsys.readouterr().out)
    assert figures["hits"] == hits
    assert figures["skipped_lines"] == (kind != "sharegpt")
    config = tmp_path / "sim.toml"
    config.write_text(
        f'trace = {{path="trace", format="{kind}"}}\n'
        'model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}\n'
        "manager = {block_tokens=2, keep=0}\n"
        'tiers = [{kind="gpu", blocks=1000}]\n'
    )
    assert main(["sim", "run", str(config), "--json", "--lenient"]) == left_out
    same = json.loads(capsys.readouterr().out)
    assert same["tiers"][0]["hits"] == hits
    assert same["skipped_lines"] == figures["skipped_lines"]
    if kind != "sharegpt":
        assert main(["sim", "run", str(config)]) == 2
        assert f"line {text.count(chr(10)) + 1}: " in capsys.readouterr().err


def test_unknown_formats_are_refused(tmp_path, capsys):
    assert main(["replay", str(write(tmp_path, AZURE)), "--format", "csv"]) == 2
    assert "--format is one of tokens, mooncake, azure" in capsys.readouterr().err


def test_a_hash_is_as_many_blocks_as_it_has_tokens_for(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 2, "input_length": 700, "output_length": 9, "hash_ids": [5, 1]}
    path.write_text(json.dumps(row) + "\n")
    source = TraceSource(path, "mooncake")
    rows = [(at, t.tolist(), *rest) for at, t, *rest in trace_requests(source, 512)]
    assert rows == [(2_000_000, [5, 1], 700, 9, None)]
    # Hash 5 is the blocks 20 to 23; of hash 1, 188 tokens are there, which begin two blocks.
    (rows,) = trace_requests(TraceSource(path, "mooncake", output=False), 128)
    assert (rows[1].tolist(), rows[3]) == ([20, 21, 22, 23, 4, 5], 1)
