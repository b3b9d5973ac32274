"""Readers: what each format's lines become, and which lines are refused or left out."""

import gzip
import importlib
import io
import itertools
import json
import sys

import numpy as np
import pytest

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.arrivals import Arrivals
from kvtrie.sim.config import TraceSource
from kvtrie.sim.readers import lines, sharegpt
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.readers.sharegpt import sharegpt_requests, words
from kvtrie.sim.readers.tables import Prompts, azure_requests, burstgpt_requests
from kvtrie.sim.readers.tokens import token_requests
from kvtrie.sim.requests import block_requests, trace_requests
from kvtrie.sim.trace import iter_trace, read_trace

SECOND = 10**9
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,40,7
2023-11-16 18:15:46.6805907,16,1
2023-11-16 18:15:48.0000000,33,0
"""
HEAD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens"
BURST = f"""{HEAD},Log Type
5,a,1.0,ChatGPT,40,10,50,Conversation log
6,b,1.0,ChatGPT,16,0,16,Conversation log
7.5,a,1.0,GPT-4,70,5,75,Conversation log
8,a,1.0,GPT-4,20,5,25,Conversation log
9,,1.0,GPT-4,20,5,25,API log
"""


def write(folder, text, name="trace"):
    path = folder / name
    path.write_text(text)
    return path


def rows(path, *lines):
    return write(path, "".join(json.dumps(line) + "\n" for line in lines))


def plain(requests):
    return [(at, tokens.tolist(), *rest) for at, tokens, *rest in requests]


def test_ranges_are_the_ids_that_they_name(tmp_path):
    path = rows(
        tmp_path,
        {"timestamp": 0, "input_length": 320, "output_length": 1, "ranges": [[3, 6], [9, 11]]},
        {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [4], "session": 7},
        {"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": [4], "session": "x"},
    )
    first, second, third = read_trace(path)
    assert first.blocks.tolist() == [3, 4, 5, 9, 10]
    assert first.blocks.dtype == np.uint32
    assert [each.session for each in (first, second, third)] == [None, "7", "x"]
    source = TraceSource(path, "mooncake", hash_tokens=64)
    assert [row[4] for row in trace_requests(source, 64)] == [None, "7", "x"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranges": []}, r"ranges is \[\]"),
        ({"ranges": [[1, 2, 3]]}, r"ranges\[0\] is \[1, 2, 3\]"),
        ({"ranges": [[1, 3], [5, 5]]}, r"ranges\[1\] is \[5, 5\)"),
        ({"ranges": [[-1, 3]]}, r"ranges\[0\] is \[-1, 3\)"),
        ({"ranges": [[0, 2**33]]}, r"ranges\[0\]"),
        ({"ranges": [[0, 2**31]]}, "more ids than 300 tokens"),
        ({"ranges": [[0, 200], [200, 400]]}, "more ids than 300 tokens"),
        ({"ranges": [[1.0, 2]]}, r"ranges\[0\] is \[1.0, 2\]"),
        ({"ranges": [[1, 2]], "hash_ids": [1]}, "both given"),
        ({"ranges": [[1, 2]], "session": [1]}, "session is"),
    ],
)
def test_a_wrong_range_is_named_with_its_line(tmp_path, change, message):
    line = {"timestamp": 0, "input_length": 300, "output_length": 1, **change}
    good = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        read_trace(rows(tmp_path, good, line))


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


def test_azure_lines_have_dates_and_lengths(tmp_path):
    rows = plain(azure_requests(write(tmp_path, AZURE), 16))
    assert rows == [
        (0, [0, 1, 2], 40, 7, None),
        (700, [3], 16, 1, None),
        (1_319_410_000, [4, 5, 6], 33, 0, None),
    ]
    zoned = AZURE.replace("18:15:48.0000000", "19:15:48+01:00")
    assert plain(azure_requests(write(tmp_path, zoned), 16)) == rows


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("TIMESTAMP,", "TIME,", "line 1: there is no column TIMESTAMP among TIME, ContextTokens"),
        (",16,1", ",0,1", "line 3: ContextTokens is 0"),
        (",16,1", ",x,1", "line 3: ContextTokens is 'x'"),
        (",16,1", ",16,nan", "line 3: GeneratedTokens is 'nan'"),
        (",16,1", ",16", "line 3: 2 cells, 3 wanted"),
        ("46.6805907", "46.5", "line 3: TIMESTAMP is -0.18059 s, before the 0.0 s"),
        ("2023-11-16 18:15:48", "2023-13-16 18:15:48", "line 4: TIMESTAMP is '2023-13"),
    ],
)
def test_a_bad_cell_is_named(tmp_path, was, now, message):
    with pytest.raises(ConfigError, match=message):
        list(azure_requests(write(tmp_path, AZURE.replace(was, now)), 16))


def test_a_session_begins_with_its_earlier_turns(tmp_path):
    rows = plain(burstgpt_requests(write(tmp_path, BURST), 16))
    # 40 + 10 tokens are three whole blocks, of which the prompt had two and a partial one.
    assert rows == [
        (5 * SECOND, [0, 1, 3], 40, 10, "a"),
        (6 * SECOND, [4], 16, 0, "b"),
        (7_500_000_000, [0, 1, 2, 5, 6], 70, 5, "a"),
        (8 * SECOND, [7, 8], 20, 5, "a"),  # shorter than what was said: a new conversation
        (9 * SECOND, [9, 10], 20, 5, None),
    ]
    without = "\n".join(
        ",".join(cell for at, cell in enumerate(line.split(",")) if at not in {1, 2})
        for line in BURST.splitlines()
    )
    rows = plain(burstgpt_requests(write(tmp_path, without), 16))
    ids = [block for _, blocks, *_ in rows for block in blocks]
    assert ids == list(range(len(ids)))
    with pytest.raises(ConfigError, match="line 2: Timestamp is '-1'"):
        list(burstgpt_requests(write(tmp_path, BURST.replace("\n5,", "\n-1,")), 16))


def chat(name, *texts):
    """A conversation in which `human` and `gpt` take turns."""
    turns = [
        {"from": who, "value": text} for who, text in zip(itertools.cycle(["human", "gpt"]), texts)
    ]
    return {"id": name, "conversations": turns}


CHATS = [
    chat("one", "a b", "c d e", "f"),
    chat("two", "a b", "c d e", "f g", "h"),
    {"id": "three", "conversations": [{"from": "gpt", "value": "hello"}]},
    {
        "conversations": [
            {"from": "system", "value": "s s"},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
        ]
    },
]


def letters(text):
    return [ord(each[0]) for each in text.split()]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CHATS),
        json.dumps(CHATS, indent=2),
        "\n".join(map(json.dumps, CHATS)),
    ],
)
def test_conversations_become_turns(tmp_path, text):
    path = write(tmp_path, text)
    arrivals = Arrivals("fixed", per_s=1).times(0)
    rows = plain(sharegpt_requests(path, arrivals, tokenize=letters, think_s=0))
    a, b, c, d, e, f, g, s = map(ord, "abcdefgs")
    assert rows == [
        (1 * SECOND, [a, b], 2, 3, "one"),
        (2 * SECOND, [a, b], 2, 3, "two"),
        (2 * SECOND, [a, b, c, d, e, f, g], 7, 1, "two"),
        (3 * SECOND, [s, s, a], 3, 1, None),
    ]


def test_turns_come_in_order_of_time(tmp_path):
    path = write(tmp_path, json.dumps([chat(str(n), *"abcdefgh") for n in range(50)]))
    rows = list(sharegpt_requests(path, Arrivals(per_s=1).times(3), think_s=20, seed=3))
    assert len(rows) == 200
    times = [each[0] for each in rows]
    assert times == sorted(times)
    assert times != [each[0] for each in sharegpt_requests(path, Arrivals().times(4), seed=4)]
    for session in {each[4] for each in rows}:
        lengths = [each[2] for each in rows if each[4] == session]
        assert lengths == sorted(lengths)
        assert len(lengths) == 4


def test_a_bad_conversation_is_named_with_its_line(tmp_path):
    good, bad = json.dumps(CHATS[0]), '{"conversations": [{"from": "human"}]}'
    path = write(tmp_path, f"[{good},\n{bad},\n{good}]")
    arrivals = Arrivals().times(0)
    with pytest.raises(ConfigError, match=r"line 2: conversations\[0\]\.value is None"):
        list(sharegpt_requests(path, arrivals))
    skipped = Skipped()
    assert len(list(sharegpt_requests(path, arrivals, skipped=skipped))) == 2
    assert skipped.lines == 1
    with pytest.raises(ConfigError, match="line 2: no JSON"):
        list(sharegpt_requests(write(tmp_path, f"[{good},\n{{"), arrivals, skipped=skipped))
    with pytest.raises(ConfigError, match="holds no request"):
        list(sharegpt_requests(write(tmp_path, "[]"), arrivals))


def test_words_are_equal_where_texts_are():
    assert words("Tell me more.") == words("Tell me more.")
    assert words("Tell me more.")[:3] == words("Tell me more, please")[:3]
    assert len(words("internationalisation of it")) == 6
    assert all(0 <= token < 2**32 for token in words("Grüße, 你好!"))


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


def zstd_of(data):
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return importlib.import_module(name).compress(data)


@pytest.mark.parametrize("pack", [gzip.compress, zstd_of])
@pytest.mark.parametrize(
    ("kind", "text"), [("azure", AZURE), ("sharegpt", json.dumps(CHATS)), ("burstgpt", BURST)]
)
def test_compressed_traces_are_read_as_they_are(tmp_path, pack, kind, text):
    plain, packed = write(tmp_path, text, "plain"), tmp_path / "packed"
    packed.write_bytes(pack(text.encode()[:70]) + pack(text.encode()[70:]))
    found, same = (plain_rows(TraceSource(path, kind)) for path in (plain, packed))
    assert found == same
    assert len(found) >= 3


def plain_rows(source):
    return plain(trace_requests(source, 16))


@pytest.mark.parametrize("pack", [gzip.compress, zstd_of])
@pytest.mark.parametrize("kind", ["mooncake", "sharegpt", "azure"])
@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: data[:20] + b"?" * 90])
def test_damaged_compression_is_one_error(tmp_path, pack, kind, spoil):
    path = tmp_path / "packed"
    path.write_bytes(spoil(pack(np.random.default_rng(0).bytes(999))))
    with pytest.raises(ConfigError, match=r"cannot read the trace .*packed: "):
        list(trace_requests(TraceSource(path, kind), 16))


@pytest.mark.parametrize("kind", ["tokens", "mooncake", "azure", "sharegpt"])
def test_a_line_without_end_is_not_read_to_its_end(tmp_path, monkeypatch, kind):
    for module in (lines, sharegpt):
        monkeypatch.setattr(module, "MOST_CHARACTERS", 2**16)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"[" + b'"' * (kind == "sharegpt") + b"0" * 2**24))
    with pytest.raises(ConfigError, match=r"bomb\.gz, line 1: .* 65536 characters"):
        list(trace_requests(TraceSource(path, kind), 16))


def test_zstd_without_its_module_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    path = tmp_path / "packed"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(ConfigError, match=r"pip install 'kvtrie\[cli\]'"):
        read_trace(path)


def test_unknown_formats_are_refused(tmp_path, capsys):
    assert main(["replay", str(write(tmp_path, AZURE)), "--format", "csv"]) == 2
    assert "--format is one of tokens, mooncake, azure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "hashes", "given", "message"),
    [
        (521, 33, 512, "input_length is 521 in 33 hashes, .* 512 tokens .*: 16 fits"),
        (700, 44, 512, "16 fits"),
        (5000, 1, 512, "4096 fits"),
        (5000, 10, 16, "512 fits"),
        (30, 3, 16, "8 fits"),
        (0, 1, 512, "no number fits"),
        (3, 10, 1, "no number fits"),
    ],
)
def test_a_line_whose_fields_contradict_each_other_names_what_fits(
    tmp_path, tokens, hashes, given, message
):
    line = {"timestamp": 0, "input_length": tokens, "output_length": 1}
    listed = {**line, "hash_ids": list(range(hashes))}
    fits = {**line, "input_length": given, "hash_ids": [1]}
    for last in (listed, {**listed, "session_id": 3}, {**line, "ranges": [[0, hashes]]}):
        source = TraceSource(rows(tmp_path, fits, last), "mooncake", hash_tokens=given)
        with pytest.raises(
            ConfigError, match=f"line 2: .*{message}" if tokens >= hashes else "line 2"
        ):
            list(trace_requests(source, given))


@pytest.mark.parametrize("hashes", [2, 3])
def test_a_last_partial_block_may_have_a_hash_or_none(tmp_path, hashes):
    line = {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [*range(hashes)]}
    source = TraceSource(rows(tmp_path, line), "mooncake", hash_tokens=16)
    assert [each[1].tolist() for each in trace_requests(source, 16)] == [line["hash_ids"]]


def test_a_line_claims_no_more_blocks_than_a_tier_holds(tmp_path):
    line = {"timestamp": 0, "input_length": 2**32 - 1, "output_length": 1}
    wide = rows(tmp_path, {**line, "ranges": [[0, 2**32 - 1]]})
    with pytest.raises(ConfigError, match=r"line 1: the prompt has 4294967295 blocks, at most"):
        list(trace_requests(TraceSource(wide, "mooncake", hash_tokens=1), 1))
    with pytest.raises(ConfigError, match="at most 1048576 wanted"):
        read_trace(wide)
    two = rows(tmp_path, {**line, "hash_ids": [0, 1]})
    with pytest.raises(ConfigError, match="has 2 blocks, at most 0 wanted"):
        list(trace_requests(TraceSource(two, "mooncake", hash_tokens=2**31), 1))
    table = write(tmp_path, AZURE.replace(",40,7", ",4294967295,7"))
    with pytest.raises(ConfigError, match="line 2: the prompt has 4294967295 blocks"):
        list(azure_requests(table, 1))
    path = write(tmp_path, BURST.replace(",40,10,", ",40,4294967295,"))
    with pytest.raises(ConfigError, match="line 2: the prompt has 4294967335 blocks"):
        list(burstgpt_requests(path, 1))


def test_fields_that_are_not_read_are_named_once(tmp_path, caplog):
    line = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
    more = {**line, "chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text"}
    path = rows(tmp_path, more, {**more, "session_id": 7})
    for _ in range(2):
        assert [each.session for each in read_trace(path)] == [None, "7"]
    (message,) = caplog.messages
    assert "chat_id, parent_chat_id, turn and type are not read" in message
    caplog.clear()
    read_trace(write(tmp_path, json.dumps({**line, "session": "x", "note": "type"}), "other"))
    assert not caplog.messages
    with pytest.raises(ConfigError, match="session is 'x' and session_id '7'"):
        read_trace(rows(tmp_path, {**line, "session": "x", "session_id": 7}))


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


def test_ids_start_again_after_the_last():
    prompts = Prompts(16)
    prompts._next = 2**32 - 1
    assert prompts.of(None, 32, 0).tolist() == [2**32 - 1, 0]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [(Arrivals("poisson", 4), 1), (Arrivals("gamma", 4, 3), 3), (Arrivals("gamma", 4, 0.2), 0.2)],
)
def test_arrivals_have_the_rate_and_the_spread(arrivals, cv):
    times = np.array(list(itertools.islice(arrivals.times(1), 40_000))) / SECOND
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert next(arrivals.times(2)) != next(arrivals.times(1)) == next(arrivals.times(1))
