"""`kvtrie trace convert`: each form that is read, in the compact form, with the same requests."""

import gzip
import importlib
import json
import sys

import pytest

from kvtrie.cli import main
from kvtrie.sim.config import TraceSource
from kvtrie.sim.requests import block_requests

LINE = {"input_length": 48, "output_length": 2}
CHAT = [{"from": "human", "value": "a b c d e f g"}, {"from": "gpt", "value": "h i"}] * 2
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.68,40,7
2023-11-16 18:15:47,16,1
"""
FORMS = {
    "hashes": (
        "mooncake",
        [
            {"timestamp": 3, "hash_ids": [4, 5, 9], **LINE},
            {"timestamp": 4.5, "hash_ids": [4, 5, 6], "session": "é", **LINE},
        ],
    ),
    "wide": (
        "mooncake",
        [
            {"timestamp": "1753780607550317897", "hash_ids": [2**64 - 1, 7, 2**40], **LINE},
            {"timestamp": "1753780607550317900", "hash_ids": [2**64 - 1, 7, 5], **LINE},
        ],
    ),
    "texts": (
        "mooncake",
        [
            {
                "timestamp": "2026-09-24T10:00:00.1Z",
                "hash_ids": ["9f86d081884c7d65", "ff", "0"],
                **LINE,
            }
        ],
    ),
    "ranges": ("mooncake", [{"timestamp": 0, "ranges": [[8, 10], [3, 4]], **LINE}]),
    "agents": (
        "mooncake",
        [
            {"timestamp": 0, "hash_ids": [1, 2, 3], "request_id": "a", **LINE},
            {
                "timestamp": 0,
                "hash_ids": [1, 2, 4],
                "wait_for": ["a"],
                "tool_wait_ms": 2.5,
                "delay": 1,
                **LINE,
            },
        ],
    ),
    "tokens": (
        "tokens",
        [
            {"arrival_ns": 7, "tokens": [*range(40)]},
            {"arrival_ns": 9, "tokens": [*range(39), 8], "output_tokens": 4},
        ],
    ),
    "azure": ("azure", AZURE),
    "burstgpt": (
        "burstgpt",
        "Timestamp,Session ID,Request tokens,Response tokens\n5,a,40,10\n6.5,a,70,5\n",
    ),
    "sharegpt": ("sharegpt", [{"id": "x", "conversations": CHAT}]),
}


def file_of(folder, name):
    kind, content = FORMS[name]
    text = (
        content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
    )
    path = folder / name
    path.write_text(text)
    return path, kind


def requests(path, kind):
    source = TraceSource(path, kind, hash_tokens=16)
    return list(block_requests(source, 16, waits=True))


def numbered(found):
    """Requests with their blocks numbered as they appear."""
    known = {}
    return [
        (
            one.at,
            one.input_tokens,
            one.output_tokens,
            [known.setdefault(block, len(known)) for block in one.blocks.tolist()],
            one.session,
            one.waits,
        )
        for one in found
    ]


def zstd_of(data):
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return importlib.import_module(name).decompress(data)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_each_form_has_the_same_requests_in_the_compact_form(tmp_path, capsys, name, suffix):
    path, kind = file_of(tmp_path, name)
    out = tmp_path / f"out.jsonl{suffix}"
    command = ["trace", "convert", str(path), str(out), "--format", kind, "--block-tokens", "16"]
    assert main(command) == 0
    assert "requests, a hash is 16 tokens" in capsys.readouterr().err
    wanted, found = requests(path, kind), requests(out, "mooncake")
    assert numbered(found) == numbered(wanted)
    unpack = {"": bytes, ".gz": gzip.decompress, ".zst": zstd_of}[suffix]
    lines = unpack(out.read_bytes()).splitlines()
    assert len(lines) == len(wanted)
    assert all("arrival_ns" in json.loads(line) for line in lines)


def test_the_compact_form_is_ranges_or_a_shorter_list(tmp_path, capsys):
    path, _ = file_of(tmp_path, "hashes")
    out = tmp_path / "out"
    assert main(["trace", "convert", str(path), str(out), "--block-tokens", "16"]) == 0
    assert out.read_text().splitlines() == [
        '{"arrival_ns":3000000,"input_length":48,"output_length":2,"ranges":[[0,3]]}',
        '{"arrival_ns":4500000,"input_length":48,"output_length":2,"hash_ids":[0,1,3],"session":"\\u00e9"}',
    ]
    path, _ = file_of(tmp_path, "agents")
    assert main(["trace", "convert", str(path), str(out), "--block-tokens", "16"]) == 0
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["request_id"] == "0"
    assert (second["wait_for"], second["tool_wait_ms"]) == (["0"], 3.5)
    capsys.readouterr()


def test_a_trace_that_cannot_be_leaves_no_file(tmp_path, capsys):
    path = tmp_path / "bad"
    path.write_text(
        '{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1]}\n{\n'
    )
    out = tmp_path / "out"
    command = ["trace", "convert", str(path), str(out), "--block-tokens", "16"]
    assert main(command) == 2
    assert "line 2: no JSON" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--lenient"]) == 1
    assert "1 requests, a hash is 16 tokens; 1 lines were left out" in capsys.readouterr().err
    assert main(["trace", "convert", str(path), str(tmp_path)]) == 2
    assert main(["trace", "convert", str(path), str(out), "--block-tokens", "0"]) == 2
    assert "--block-tokens is 0" in capsys.readouterr().err
