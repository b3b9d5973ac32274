"""`readers.lines`: bad lines are counted and left out, and memory is bounded."""

import gzip
import io
import itertools
import sys

import pytest
from trace_files import rows, write

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.config import TraceSource
from kvtrie.sim.readers import lines, sharegpt
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.readers.tokens import token_requests
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.trace import iter_trace


def test_lenient_leaves_out_bad_lines_and_counts_them(tmp_path):
    good = '{"arrival_ns": 5, "tokens": [1, 2]}\n'
    bad = '{"arrival_ns": 4, "tokens": [1]}\n{\n{"arrival_ns": 9, "tokens": [true, 1]}\n'
    path = write(tmp_path, f"{good}{bad}\n{good}")
    skipped = Skipped()
    assert len(list(token_requests(path, skipped))) == 2
    assert skipped.lines == 3
    assert "line 2: arrival_ns is 4" in str(skipped.first)
    with pytest.raises(ConfigError, match="line 2"):
        list(token_requests(path))
    with pytest.raises(ConfigError, match=r"holds no request: .*line 1: no JSON"):
        list(token_requests(write(tmp_path, "{\n"), Skipped()))


def test_a_line_that_is_left_out_sets_no_time(tmp_path):
    late = {"timestamp": 9, "input_length": 1, "output_length": -1, "hash_ids": [1]}
    good = {"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    skipped = Skipped()
    assert [r.at for r in iter_trace(rows(tmp_path, late, good), skipped)] == [5 * 10**6]


@pytest.mark.parametrize("kind", ["tokens", "mooncake", "azure", "sharegpt"])
def test_a_line_without_end_is_not_read_to_its_end(tmp_path, monkeypatch, kind):
    for module in (lines, sharegpt):
        monkeypatch.setattr(module, "MOST_CHARACTERS", 2**16)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"[" + b'"' * (kind == "sharegpt") + b"0" * 2**24))
    with pytest.raises(ConfigError, match=r"bomb\.gz, line 1: .* 65536 characters"):
        list(trace_requests(TraceSource(path, kind), 16))


@pytest.mark.parametrize(("bad", "status"), [(1, 0), (2, 1)])
def test_lenient_warns_first_that_more_than_a_tenth_is_left_out(tmp_path, capsys, bad, status):
    good = '{"arrival_ns": 5, "tokens": [1, 2]}\n'
    path = write(tmp_path, good * 12 + "oops\n" * bad)
    command = ["replay", str(path), "--format", "tokens", "--block-tokens", "2", "--lenient"]
    assert main(command) == status
    err = capsys.readouterr().err
    assert err.startswith(f"--lenient left out {bad} of {12 + bad} lines") == status
    config = tmp_path / "sim.toml"
    config.write_text(
        'trace = {path="trace", format="tokens", lenient=true}\n'
        'model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}\n'
        'manager = {block_tokens=2, keep=0, policy="lru"}\nengine = {kind="serial"}\n'
        'tiers = [{kind="gpu", blocks=1000}]\n'
    )
    for action, *more in (["run"], ["sweep", "--over", "tiers.0.blocks=9,99"], ["capacities"]):
        assert main(["sim", action, str(config), *more]) == status
        assert ("--lenient left out" in capsys.readouterr().err) == status


class Endless:
    """A path whose file has a number of lines, made as they are read."""

    def __init__(self, head, line, lines):
        self.head, self.line, self.lines = head, line, lines

    def open(self, mode):
        assert mode == "rb"
        return io.BufferedReader(
            Lines(itertools.chain(self.head, map(self.line, range(self.lines))))
        )


class Lines(io.RawIOBase):
    """A file of lines, made as they are read."""

    def __init__(self, lines):
        self.lines, self.left = lines, b""

    def readable(self):
        return True

    def readinto(self, buffer):
        self.left = self.left or next(self.lines, "").encode()
        part, self.left = self.left[: len(buffer)], self.left[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


TOKENS = Endless((), lambda n: f'{{"arrival_ns": {n}, "tokens": [1, 2, {n}]}}\n', 10**5)

MOONCAKE = Endless(
    (),
    lambda n: (
        f'{{"timestamp": {n}, "input_length": 700, "output_length": 1, "hash_ids": [1, {n}]}}\n'
    ),
    10**5,
)

CSV = Endless(
    ("Timestamp,Request tokens,Response tokens,Session ID\n",), lambda n: f"{n},99,9,{n}\n", 10**5
)


def peak_memory(requests):
    """Largest growth of the number of Python objects while requests are read."""
    first, most, count = sys.getallocatedblocks(), 0, 0
    for count, _ in enumerate(requests, 1):
        if count % 1000 == 0:
            most = max(most, sys.getallocatedblocks() - first)
    return most, count


@pytest.mark.parametrize(
    ("kind", "file", "bound"),
    [("tokens", TOKENS, 1000), ("mooncake", MOONCAKE, 1000), ("burstgpt", CSV, 6 * 2**16)],
)
def test_a_long_trace_streams_in_bounded_memory(kind, file, bound):
    peak, count = peak_memory(trace_requests(TraceSource(file, kind), 512))
    assert peak < bound
    assert count == 10**5


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "file"), [("tokens", TOKENS), ("mooncake", MOONCAKE)])
def test_a_million_requests_stream_in_bounded_memory(kind, file):
    source = TraceSource(Endless(file.head, file.line, 10**6), kind)
    peak, count = peak_memory(trace_requests(source, 512))
    assert peak < 1000
    assert count == 10**6
