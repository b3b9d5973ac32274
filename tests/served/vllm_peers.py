"""Two vLLM servers that read each other's host memory: vLLM's tier `p2p` under our eviction.

NIXL opens ports on the interfaces of its machine, so the servers run in a network namespace. The
tests are skipped by name without NIXL, which `make engines` installs.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import servers
from servers import BLOCK, prompt, same
from vllm_processes import Process

sys.path.append(str(Path(__file__).parents[2]))
from tests import namespace, store_servers

pytest.importorskip("nixl", reason="no NIXL: make engines in a new environment")
pytestmark = pytest.mark.since("0.32")

PROMPTS = [prompt(seed, 200) for seed in range(4)]
FULL = 200 // BLOCK * BLOCK
PATIENCE_S = 30.0
SERVER = """
import json, select, sys
sys.path.insert(0, {here!r})
import servers

def main():
    with servers.offload({model!r}, {extra!r}, blocks=64, disable_log_stats=False) as server:
        print("ready", flush=True)
        while True:
            # A server answers its peers in its steps, which a separate engine makes all the time.
            while not select.select([sys.stdin], [], [], 0.001)[0]:
                server.llm.llm_engine.step()
            line = sys.stdin.readline()
            if not line:
                return
            prompts, source = json.loads(line)
            more = {{"extra_args": {{"kv_transfer_params": source}}}} if source else {{}}
            answers = server.answers(prompts, **more)
            name = "vllm:prompt_tokens_cached_by_source"
            rows = [each for each in server.llm.get_metrics() if each.name == name]
            found = {{each.labels["source"]: each.value for each in rows if each.value}}
            print(json.dumps({{"answers": answers, "found": found}}), flush=True)

if __name__ == "__main__":
    main()
"""


class Peer(Process):
    """A server whose host memory other servers may read."""

    script = SERVER

    def __init__(self, folder, model):
        folder.mkdir()
        self.port = store_servers.free_port()
        tier = {"type": "p2p", "host": "127.0.0.1", "port": self.port}
        super().__init__(folder, model, servers.offloading(chunks=64, secondary_tiers=[tier]))

    def ask(self, asked, source=None):
        """Answers, and the prompt tokens found so far by the tier that had them."""
        answer = self.send([[asked], source])
        return [(tokens, chances) for tokens, chances in answer["answers"]], answer["found"]


@contextmanager
def peers(folder, *names):
    """Servers of one model; they are killed at the end."""
    model, started = servers.tiny_llama(folder / "model"), []
    try:
        started += (Peer(folder / name, model) for name in names)
        yield started
    finally:
        for each in started:
            if each.child.poll() is None:
                each.kill()  # vLLM waits for ever to send what it wanted to send to a dead peer


def source(peer, name):
    """Parameters of a request that may take its blocks from a server."""
    where = {"remote_host": "127.0.0.1", "remote_port": peer.port, "kv_request_id": name}
    return {"remote_kv_source": where}


def test_tiers_of_vllm_are_passed_on_under_our_eviction():
    from kvtrie.engines.vllm.offloading import _with_tiers

    tiers = [{"type": "p2p", "port": 5710}, {"type": "kvcr", "control_ports": [5720]}]
    given = _with_tiers({"secondary_tiers": tiers, "disk": {"path": "/kv"}})
    assert given["secondary_tiers"][:2] == tiers
    assert [tier["type"] for tier in given["secondary_tiers"]] == ["p2p", "kvcr", "KvtrieDiskTier"]
    assert given["eviction_policy"] == "KvtrieCachePolicy"


@pytest.mark.skipif(namespace.INSIDE, reason="runs the other")
def test_in_a_network_namespace():
    if not namespace.possible():
        pytest.skip("no network namespace: unshare -n does not work here")
    root = Path(__file__).parents[2]
    options = ["-q", "-c", "tests/served/pytest.ini", "--rootdir", root, "-k", "another_server"]
    ended = namespace.run("pytest", *options, Path(__file__), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "1 passed" in ended.stdout


@pytest.mark.skipif(not namespace.INSIDE, reason="runs in a network namespace")
def test_blocks_come_from_another_server_until_it_is_killed(tmp_path):
    with peers(tmp_path, "a", "b") as (a, b):
        wanted = [a.ask(each)[0] for each in PROMPTS]
        for at in range(2):
            answers, found = b.ask(PROMPTS[at], source(a, f"read {at}"))
            same(answers, wanted[at])
            assert found == {"p2p": (at + 1) * FULL}
        a.kill()
        for at in range(2, 4):
            began = time.monotonic()
            answers, found = b.ask(PROMPTS[at], source(a, f"lost {at}"))
            same(answers, wanted[at])
            assert found == {"p2p": 2 * FULL}
            assert time.monotonic() - began < PATIENCE_S
        answers, found = b.ask(PROMPTS[0])
        same(answers, wanted[0])
        assert found == {"p2p": 2 * FULL, "device": FULL}
