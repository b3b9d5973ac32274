"""Servers in separate processes: killed, and restarted over damaged files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import servers
from servers import BLOCK, prompt, same

from kvtrie._kvtrie import DiskStore

PROMPTS = [prompt(seed, 200) for seed in range(3)]

SERVER = """
import json, sys
sys.path.insert(0, {here!r})
import servers

def main():
    with servers.serve({model!r}, {extra!r}, blocks=64) as server:
        print("ready", flush=True)
        for line in sys.stdin:
            prompts = json.loads(line)
            answers = server.answers(prompts)
            server.wait_for_stores()
            cached = server.found
            server.forget()
            tokens = server.kv_scheduler.cache.counters.tokens
            print(
                json.dumps({{"answers": answers, "cached": cached, "tokens": tokens}}), flush=True
            )

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return servers.tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wanted(model):
    with servers.serve(model) as server:
        return server.answers(PROMPTS)


class Process:
    """A server that is asked through its pipes.

    Attributes:
        script: the program of its process.
        tokens: prompt tokens by their source, after the last question.
    """

    script = SERVER

    def __init__(self, folder, model, extra):
        script = folder / "server.py"
        here = str(Path(__file__).parent)
        script.write_text(self.script.format(here=here, model=model, extra=extra))
        self.child = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.line("ready")

    def line(self, begin):
        """The next line of ours; vLLM may print some."""
        for line in self.child.stdout:
            if line.startswith(begin):
                return line
        raise AssertionError(f"the server has ended with {self.child.wait()}")

    def send(self, question):
        """The answer to a question, as the script gives it."""
        self.child.stdin.write(json.dumps(question) + "\n")
        self.child.stdin.flush()
        return json.loads(self.line("{"))

    def ask(self, prompts):
        answer = self.send(prompts)
        self.tokens = answer["tokens"]
        return [(tokens, chances) for tokens, chances in answer["answers"]], answer["cached"]

    def kill(self):
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def end(self):
        self.child.stdin.close()
        assert self.child.wait(120) == 0


def disk(folder):
    return {
        "tiers": [
            {"kind": "host", "blocks": 32},
            {"kind": "disk", "blocks": 256, "path": str(folder / "kv")},
        ]
    }


def test_a_killed_server_restarts_over_damaged_files(model, wanted, tmp_path):
    first = Process(tmp_path, model, disk(tmp_path))
    answers, _ = first.ask(PROMPTS)
    same(answers, wanted)
    first.kill()
    second = Process(tmp_path, model, disk(tmp_path))
    answers, whole = second.ask(PROMPTS)
    same(answers, wanted)
    assert whole >= 2 * 6 * BLOCK
    second.kill()
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > 65536:
            raw = bytearray(path.read_bytes())
            for at in range(len(raw) // 2, len(raw), 65536):
                raw[at] ^= 8
            path.write_bytes(raw)
    third = Process(tmp_path, model, disk(tmp_path))
    answers, cached = third.ask(PROMPTS)
    same(answers, wanted)
    assert cached < whole
    third.end()


def test_a_killed_server_leaves_the_ages_of_its_blocks(model, tmp_path):
    process = Process(tmp_path, model, disk(tmp_path))
    process.ask(PROMPTS[:2])
    assert process.ask(PROMPTS[:1])[1] > 0
    process.ask(PROMPTS[2:])  # this also writes the ages of the other blocks
    process.kill()
    (store,) = DiskStore.stores(tmp_path / "kv")
    rows = DiskStore.inspect(store[0]).blocks(time.time_ns())
    ages = {uses: [row[4] for row in rows if row[5] == uses] for uses in (1, 2)}
    assert len(ages[2]) >= 5
    # Those of the other two prompts: one was used before them, one after.
    assert min(ages[1]) < min(ages[2]) <= max(ages[2]) < max(ages[1])
