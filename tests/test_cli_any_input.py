"""No command ends in a traceback, whatever its words and files are: it prints or refuses."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest
from any_input import changed, edited, toml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtrie.cli import main

FEW, MANY = 150, 10_000
VALUES = st.one_of(
    st.sampled_from(
        [
            *("", " ", "0", "-1", "1", "7", "4294967296", "9" * 5000, "nan", "inf", "1e400", "x"),
            *("=", "a=", "=1", "gpu=4", "gpu=0", "host=1GB", "host=9EB", "lru", "lru,fifo", ","),
            *("tiers.0.blocks=8", "tiers.9.blocks=1", "machines=2", "seed=1,2", "x.y.z=[", "a\nb"),
            *("\0", "\ud800", "25%", "101%", "8GB", "kv:2GB", "/dev/null/x", ".", "\u0663", "{"),
            *("ttft_p99_ns=1", "tiers.0.blocks=4:9", "1,2,3", "cost.ns_per_token", "int8", "true"),
        ]
    ),
    st.text(max_size=6),
)
CONFIG = {
    "trace": {"path": "t.jsonl", "format": "tokens"},
    "model": {"layers": 4, "kv_heads": 1, "head_dim": 64, "dtype": "float16"},
    "manager": {"block_tokens": 16, "policy": "lru"},
    "cost": {"kind": "affine", "ns_per_token": 1000, "alpha": 0.0},
    "tiers": [{"kind": "gpu", "blocks": 8, "write": "through"}, {"kind": "host", "blocks": 64}],
}
HASHED = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
EVENTS = (
    {"recording": "kvtrie events", "version": 1, "tokens": False},
    {"number": 0, "at": 1.0, "stored": [{"blocks": [1, 2, 3], "size": 16}]},
    {"number": 1, "at": 9.0, "stored": [{"blocks": [4, 5], "size": 16, "parent": 2}]},
)
FILES = {
    "t.jsonl": edited(
        "".join(json.dumps({"arrival_ns": at, "tokens": [*range(40)]}) + "\n" for at in range(3))
    ),
    "h.jsonl": edited(json.dumps(HASHED) + "\n"),
    "e.jsonl": edited("".join(json.dumps(row) + "\n" for row in EVENTS)),
    "s.toml": changed(CONFIG, most=2).map(toml),
    "r.json": edited("{}"),
    "p.toml": edited('[lanes."host read"]\nbytes_per_s = 1e9\nlatency_ns = 5\n'),
}
COMMANDS = {
    ("replay", "h.jsonl"): (
        *("tier", "policy", "block-tokens", "load", "structure", "rooms", "evictions", "points"),
        *("model", "groups", "format", "objective", "save", "time-unit"),
    ),
    ("trace", "convert", "h.jsonl", "c.jsonl"): ("format", "time-unit", "block-tokens"),
    ("sim", "run", "s.toml"): (
        "set",
        "requests",
        "decisions",
        "best",
        "sample-ns",
        "csv",
        "perfetto",
    ),
    ("sim", "sweep", "s.toml"): ("set", "over", "results", "csv"),
    ("sim", "compare", "s.toml"): ("set", "vary", "csv"),
    ("sim", "capacities", "s.toml"): ("set", "points"),
    ("sim", "size", "s.toml"): ("set", "goal", "over", "points", "within"),
    ("sim", "calibrate", "s.toml"): ("set", "seen", "fit", "write"),
    ("map", "r.json"): ("session",),
    ("stats", "r.json"): (),
    ("disk", "ls", "."): (),
    ("disk", "verify", "kv"): (),
    ("disk", "gc", "kv"): ("older-than",),
    ("remote", "gc"): (),
    ("advise", "e.jsonl"): ("gpu", "host", "disk", "policy", "link", "bytes-per-token", "model"),
    ("advise", "h.jsonl"): ("gpu", "host", "disk", "format", "block-tokens", "bytes-per-token"),
    ("vllm", "m", "--print"): ("host", "disk", "keep", "policy", "objective", "control"),
    ("sglang", "m", "--print"): ("host", "disk", "policy", "objective", "control"),
    ("ctl", "none.sock"): (),
    ("why", "none.sock"): ("limit",),
}


@st.composite
def calls(draw):
    """The words of a command, and the content of its files."""
    words = draw(st.sampled_from(list(COMMANDS)))
    options = COMMANDS[words]
    more = draw(st.lists(st.sampled_from(options), max_size=3)) if options else []
    flags = [f"--{name}={draw(VALUES)}" for name in more]
    loose = draw(st.lists(VALUES, max_size=1)) if draw(st.integers(0, 3)) == 0 else []
    files = {
        name: draw(content) for name, content in FILES.items() if name in words or name == "t.jsonl"
    }
    return [*words, *flags, *loose], files


def try_all(folder, count):
    """Run commands, each of which ends with a status."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def one(call):
        words, files = call
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as err:
            try:
                status = main(words)
            except SystemExit as ended:
                status = ended.code
        assert status in {0, 1, 2}, err.getvalue()

    one()


def test_a_command_ends_with_a_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_all(tmp_path, FEW)


@pytest.mark.deep
@pytest.mark.timeout(7200)
def test_a_command_ends_with_a_status_for_many_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_all(tmp_path, MANY)


def test_a_machine_that_lacks_something_is_a_line(monkeypatch, capsys):
    for error, said in (
        (MemoryError(), "not enough memory: an allocation failed"),
        (OSError(12, "Cannot allocate memory"), "the system refuses: [Errno 12] Cannot allocate"),
        (OSError(24, "Too many open files", "x"), "the system refuses: [Errno 24] Too many open"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr("kvtrie.demo.report.read_report", fail)
        assert main(["stats", "r.json"]) == 2
        assert said in capsys.readouterr().err
