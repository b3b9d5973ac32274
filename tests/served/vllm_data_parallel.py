"""Two data-parallel engines and two API servers: a disk each, and metrics of both together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import servers
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from servers import BLOCK
from vllm_command import Command, with_words

TIERS = [{"kind": "host", "bytes": "4MB"}, {"kind": "disk", "bytes": "8MB"}]
FOUND = 9 * BLOCK  # of a prompt of 300 tokens that comes again


def transfer(folder):
    """The value of `--kv-transfer-config` with tiers over a folder."""
    tiers = [TIERS[0], {**TIERS[1], "path": str(folder)}]
    return json.dumps(
        {
            "kv_connector": "KvtrieConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": tiers},
        }
    )


def series(server):
    """The values of kvtrie's metrics, by name and labels."""
    found = {}
    for line in server.get("/metrics").splitlines():
        if line.startswith("vllm:kvtrie_"):
            name, _, value = line.rpartition(" ")
            assert name not in found
            found[name] = float(value)
    return found


def prompts(count):
    return [
        " ".join(f"w{(at * 7 + seed * 31) % 500}" for at in range(300)) for seed in range(count)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return with_words(servers.tiny_llama(tmp_path_factory.mktemp("llama")))


API_SERVER = """
import sys
from types import SimpleNamespace

from prometheus_client import Counter, Gauge, Histogram
from kvtrie.engines.vllm.vllm_metrics import KvtrieProm

kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
config = SimpleNamespace(kv_transfer_config=None)
prom = KvtrieProm(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})
waiting, engine = float(sys.argv[1]), int(sys.argv[2])
gauges = {"vllm:kvtrie_waiting_requests": {"": waiting}}
prom.observe({"counters": {"vllm:kvtrie_wanted_tokens_total": {"": 100}}, "gauges": gauges}, engine)
"""


def test_metrics_of_api_servers_that_have_ended_are_those_of_the_engines(tmp_path):
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for waiting, engine in (("3", "0"), ("5", "1"), ("2", "0")):
        command = [sys.executable, "-c", API_SERVER, waiting, engine]
        subprocess.run(command, check=True, env=environment)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    lines = generate_latest(registry).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values == {
        'vllm:kvtrie_waiting_requests{engine="0"}': "2.0",  # what the engine has said last
        'vllm:kvtrie_waiting_requests{engine="1"}': "5.0",
        'vllm:kvtrie_wanted_tokens_total{engine="0"}': "200.0",
        'vllm:kvtrie_wanted_tokens_total{engine="1"}': "100.0",
    }


def test_two_engines_have_a_disk_each_and_two_api_servers_one_set_of_metrics(model, tmp_path):
    asked = prompts(6)
    words = ("--data-parallel-size", "2", "--api-server-count", "2")
    with Command(model, transfer(tmp_path / "kv"), *words) as server:
        first = [server.ask(prompt)[0] for prompt in asked]
        assert sorted(file.name for file in (tmp_path / "kv").iterdir()) == ["dp-0", "dp-1"]
        log = server.end()
        assert log.count("kvtrie: host ") == 2  # a line per engine
    with Command(model, transfer(tmp_path / "kv"), *words) as server:
        found = Counter()
        for _ in range(2):  # whichever engine a prompt goes to, the second time one of them has it
            for prompt, wanted in zip(asked, first, strict=True):
                answer, tokens = server.ask(prompt)
                assert answer == wanted
                found[tokens] += 1
        assert found[FOUND] >= len(asked)
        values = series(server)
        assert series(server).keys() >= values.keys()
    engines = {re.search(r'engine="(\d)"', name)[1] for name in values}
    assert engines == {"0", "1"}
    assert not any("pid=" in name for name in values)  # no series of one process
    wanted = [n for name, n in values.items() if name.startswith("vllm:kvtrie_wanted_tokens")]
    assert 0 < sum(wanted) <= 2 * len(asked) * 300
    disk = [n for name, n in values.items() if re.match(r'vllm:kvtrie_slots\{.*"disk"', name)]
    assert len(disk) == 2
    assert len(set(disk)) == 1
