"""Each parser of what a user writes gives a result or one error of kvtrie, whatever it is given.

`make test` tries a few hundred inputs per parser, the marker `deep` ten thousand.
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import suppress

import msgspec
import pytest
from any_input import EXTREMES, changed, edited, lines_of, toml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtrie.advise.recording import is_recording, read_recording
from kvtrie.advise.server_metrics import read_counters, traffic_of
from kvtrie.advise.window import Window
from kvtrie.advise.wire import Reader
from kvtrie.demo.report import read_report
from kvtrie.engines.server.commands import COMMANDS, read_command
from kvtrie.engines.server.format_figure import FormatFigure
from kvtrie.engines.sglang.pages import PageSettings
from kvtrie.engines.vllm.settings import Settings
from kvtrie.errors import KvtrieError
from kvtrie.fuse import DeviationProfile
from kvtrie.fuse.profile import load_profile
from kvtrie.settings import argument
from kvtrie.settings.sizes import path_and_size, size
from kvtrie.settings.tier import Lane, Tier
from kvtrie.sim.calibrate import read_seen
from kvtrie.sim.config import config_of, read_config
from kvtrie.sim.config.document import change, read_document
from kvtrie.sim.config.lanes import lanes_of
from kvtrie.sim.config.table import Table
from kvtrie.sim.config.trace import TraceSource
from kvtrie.sim.passes import read_passes
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.sweep import iter_sweep
from kvtrie.tiers.remote.folder import folder_of
from kvtrie.tiers.remote.url import RemoteUrl

FEW, MANY = 60, 10_000
ANY = st.one_of(st.sampled_from(EXTREMES), st.text(max_size=9), st.integers(), st.floats())
DEVIATION = {"rankings": {"0": [4, 2, 3], "2": [2]}, "shares": [0.5, 0.25]}
LANE = {"bytes_per_s": 1e9, "latency_ns": 10}
INT8 = {"dtype": "int8", "scales": "token"}
CONFIG = {
    "seed": 1,
    "trace": {"path": "t.jsonl", "format": "tokens", "arrivals": {"per_s": 3.0}, "hash_tokens": 16},
    "machines": [
        {"count": 1},
        {"tiers": [{"kind": "gpu", "blocks": 4}, {"kind": "host", "bytes": "1MB", "layout": INT8}]},
    ],
    "model": {"layers": 4, "kv_heads": 1, "head_dim": 64, "dtype": "float16"},
    "manager": {"block_tokens": 16, "policy": "lru", "cost": {"alpha": 0.5}},
    "engine": {"kind": "continuous", "token_budget": 64, "max_running": 4},
    "cost": {"kind": "table", "points": [[0, 10.0], [100, 20.0]]},
    "router": {"kind": "score", "hit_weight": 1},
    "peers": {"lookup": "all", **LANE, "shares": "nic"},
    "remote": {"shared": True, "blocks": 9, "lookup": "local", **LANE, "shares": "nic"},
    "directory": {"kind": "events", "delay_ns": 5},
    "goals": {"ttft_ns": 5},
    "price": {"gpu_hour": 2.0, "gib_hour": {"host": 0.1}},
    "lanes": {},
    "tiers": [
        {"kind": "gpu", "blocks": 4, "write": "through"},
        {
            "kind": "host",
            "blocks": 64,
            "read": LANE,
            "layout": INT8,
        },
    ],
}
PROFILE = {
    "cost": {"ns_per_token": 5.0, "table": [[0, 5.0], [64, 6.0]]},
    "lanes": {"host read": LANE, "host store": LANE},
    "both": {"host": 0.5},
    "passes": {"contexts": [0, 64], "tokens": [1, 16], "ns": [[1.0, 2.0], [2.0, 3.0]]},
    "decode": {"contexts": [0, 64], "requests": [1, 4], "ns": [[1.0, 2.0], [2.0, 3.0]]},
    "compute": {"flops_per_s": 1e9, "bytes_per_s": 1e9},
}
ROW = {"checkpoint": "ab" * 32, "native_last": 0, "native_first": 0, "block_tokens": 16}
FIGURES = {
    "kl_mean": 1e-4,
    "kl_p99": 1e-3,
    "top1": 1.0,
    "block_bytes": 9,
    "of_bf16": 0.5,
    "tokens": 9,
}
STORED = {"blocks": [1, 2], "size": 2, "parent": 3, "session": "s", "tokens": [1, 2, 3, 4]}
RECORDING = (
    {"recording": "kvtrie events", "version": 1, "tokens": True},
    {"number": 0, "at": 1.0, "rank": 0, "stored": [STORED], "removed": [1, "ab"], "cleared": True},
    {"metrics": {"prompt_tokens": 5.0, "num_gpu_blocks": 9.0, "block_size": 2.0}},
)
EVENT = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1, 2], "block_size": 1}
REPORT = {
    "format": "kvtrie report 1",
    "title": "t",
    "block_tokens": 4,
    "layers": 2,
    "tiers": {"gpu": {"slots": 4, "used": 1}},
    "sessions": {"a": ["0.", "00"]},
    "groups": {"full": 0},
}
SERVER = {
    "tiers": [
        {"kind": "host", "bytes": "8GB", "format": "int8"},
        {"kind": "remote", "path": "folder:kv?ttl=9", "workers": 2, "trust_s": 1.0},
    ],
    "policy": "lru",
    "deadline_s": 1.0,
    "why_per_second": 0,
    "control": "kv.sock",
    "max_kl": 1e-3,
    "native_first": 4,
}
PAGES = {"path": "kv", "bytes": "1GB", "durability": "none", "deadline_s": 1.0, "trust_s": 2.0}
METRICS = (
    'vllm:prompt_tokens_total{model_name="m"} 5\nvllm:prefix_cache_hits_total{model_name="m"} 2\n'
    'vllm:cache_config_info{num_gpu_blocks="9",block_size="16"} 1.0\n'
)
TRACES = {
    "tokens": lines_of({"arrival_ns": 5, "tokens": [1, 2, 3], "output_tokens": 2, "session": "s"}),
    "mooncake": lines_of(
        {"timestamp": 5, "input_length": 40, "output_length": 2, "hash_ids": [1, 2, 3]},
        {"timestamp": 5.5, "input_length": 40, "output_length": 2, "ranges": [[0, 3]], "delay": 1},
    ),
    "azure": edited(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,40,7\n"
        "2023-11-16T18:17:04+01:00,40.0,0\n"
    ),
    "burstgpt": edited(
        "Timestamp,Session ID,Request tokens,Response tokens\n5,1,40,10\n6.5,,40,0\n7,1,90,1\n"
    ),
    "sharegpt": st.one_of(
        changed(
            [
                {
                    "id": "a",
                    "conversations": [
                        {"from": "human", "value": "one two"},
                        {"from": "gpt", "value": "three"},
                    ],
                }
            ]
        ).map(json.dumps),
        edited('[{"id": "a", "conversations": [{"from": "user", "value": "x"}]}]'),
    ),
}


def written(folder, text):
    path = folder / "input"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def trace(name):
    def read(folder, text):
        source = TraceSource(written(folder, text), name, hash_tokens=16)
        list(itertools.islice(trace_requests(source, 16), 40))

    return TRACES[name], read


def read_argument(_folder, values):
    one, low, high = values
    for check in (
        lambda: argument.whole("n", one, 0, 2**63),
        lambda: argument.real("x", one, 0, math.inf),
        lambda: argument.text("t", one),
        lambda: argument.salt("s", one),
        lambda: argument.word("w", one, ("a", "b")),
        lambda: argument.flag("f", one),
        lambda: argument.folder("p", one),
        lambda: argument.url("u", one),
        lambda: argument.few("l", one, 3),
        lambda: argument.pairs("l", one, 3),
        lambda: argument.instance("i", one, int),
        lambda: size("b", one, of=lambda: 10**9),
        lambda: path_and_size("d", one),
        lambda: Tier("gpu", blocks=one),
        lambda: Tier("host", bytes=one, retained_share=low, free_low=high),
        lambda: Tier("remote", blocks=4, path=one, trust_s=low, write_limit=high),
        lambda: Lane("a", one, low, shares=high),
    ):
        with suppress(KvtrieError):
            check()


def read_url(_folder, text):
    found = RemoteUrl.parse("url", text)
    again = str(found)
    again.encode()
    if not found.password:
        assert RemoteUrl.parse("url", again) == found
    if found.scheme == "folder":
        folder_of(found)


def read_messages(_folder, frames):
    window, reader = Window(), Reader()
    for at, payload in enumerate(frames):
        window.add(reader.read((b"t", at.to_bytes(8, "big"), payload)))
    window.coverage(window.traffic())


def read_events(folder, text):
    path = written(folder, text)
    is_recording(path)
    window = Window()
    window.add_all(read_recording(path))
    window.coverage(window.traffic())
    window.gpu_blocks()
    list(window.rebuilt.requests())


def packed(document):
    try:
        return msgspec.msgpack.encode(document)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(document).encode()


def read_figure(folder, text):
    path = str(written(folder, text))
    limits = {"max_kl": 1e-3, "native_last": 0, "uncalibrated": False, "block_tokens": 16}
    FormatFigure.read("int4", path, lambda: b"\xab" * 32, **limits).text()


def read_metrics(_folder, texts):
    traffic_of(*(read_counters(text) for text in texts))


def change_setting(folder, words):
    document = read_document(written(folder, 'a = {b = [1, {c = "d"}]}\n'))
    for word in words:
        change(document, word)


def sections(document, folder):
    if isinstance(document, dict):
        (folder / "t.jsonl").touch()
        config = config_of(document, folder)
        assert config.most_blocks >= max(config.rooms()) // config.manager["machines"]
        assert config.room_bytes() > 0
        config.per_hour()


PARSERS = {
    "arguments": (st.tuples(ANY, ANY, ANY), read_argument),
    "sizes": (
        edited("8GB", "512MiB", "25%", "1_000B", "1e9B"),
        lambda _, text: size("s", text, of=lambda: 9),
    ),
    "paths and sizes": (edited("/kv:200GB", "kv:25%"), lambda _, text: path_and_size("d", text)),
    "paths": (
        edited("/kv", "~/kv", "file:///kv%20a", "file://localhost/a"),
        lambda _, text: argument.folder("p", text),
    ),
    "URLs": (
        edited("folder:/kv/a%20b?ttl=9", "redis://u:p@[::1]:99/0?strict=1", "s3://b/k?x=1"),
        read_url,
    ),
    **{f"traces of {name}": trace(name) for name in TRACES},
    "recordings": (lines_of(*RECORDING), read_events),
    "messages": (
        st.lists(
            st.one_of(changed([1.0, [EVENT], 0]).map(packed), st.binary(max_size=40)), max_size=3
        ),
        read_messages,
    ),
    "metrics": (st.tuples(edited(METRICS), edited(METRICS)), read_metrics),
    "calibrations": (
        st.one_of(
            changed({**ROW, "formats": {"int4": FIGURES}}).map(json.dumps),
            edited(json.dumps({**ROW, "formats": {"int4": FIGURES}})),
        ),
        read_figure,
    ),
    "lanes": (
        changed(PROFILE).map(toml),
        lambda folder, text: lanes_of(Table("lanes", {"path": str(written(folder, text))})),
    ),
    "passes": (changed(PROFILE).map(toml), lambda folder, text: read_passes(written(folder, text))),
    "profiles": (
        changed(PROFILE).map(toml),
        lambda folder, text: load_profile(written(folder, text)),
    ),
    "settings of simulations": (
        changed(CONFIG),
        lambda folder, document: sections(document, folder),
    ),
    "files of settings": (
        st.one_of(changed(CONFIG).map(toml), edited(toml(CONFIG))),
        lambda folder, text: read_config(written(folder, text)),
    ),
    "changes of settings": (
        st.lists(edited("a.b.0=5", "a.b.1.c=x", 'a={x="y"}', "b=[1,2]"), max_size=3),
        change_setting,
    ),
    "seen times": (
        lines_of({"arrival_ns": 1, "first_token_ns": 2, "end_ns": 3}),
        lambda folder, text: read_seen(written(folder, text)),
    ),
    "results": (
        lines_of({"key": "a", "figures": {"x": 1}}),
        lambda folder, text: list(iter_sweep([], results=written(folder, text))),
    ),
    "reports": (
        st.one_of(changed(REPORT).map(json.dumps), edited(json.dumps(REPORT))),
        lambda folder, text: read_report(written(folder, text)),
    ),
    "deviation profiles": (
        st.one_of(changed(DEVIATION).map(json.dumps), edited(json.dumps(DEVIATION))),
        lambda folder, text: DeviationProfile.read(written(folder, text)),
    ),
    "settings of vLLM": (changed(SERVER), lambda _, document: Settings.read(document)),
    "settings of SGLang": (changed(PAGES), lambda _, document: PageSettings.read(document)),
    "commands": (
        st.tuples(
            st.sampled_from(sorted(COMMANDS)),
            changed({"session": "s", "tokens": [1, 2], "retain": [[0, 2]], "cache_salt": "x"}),
        ),
        lambda _, row: read_command(*row),
    ),
}


def try_all(strategy, call, folder, count):
    """Call with inputs, each of which gives a result or an error of kvtrie."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(drawn):
        with suppress(KvtrieError):
            call(folder, drawn)

    one()


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_gives_a_result_or_one_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_all(*PARSERS[name], tmp_path, FEW)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_gives_a_result_or_one_error_for_many(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_all(*PARSERS[name], tmp_path, MANY)
