"""The command of the documentation, before and after a restart, asked as users ask it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import servers
from servers import BLOCK, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
PROMPT = " ".join(f"w{at * 7 % 500}" for at in range(300))


def settings(folder):
    """The settings of the first command in `docs/vllm.md`, for a small machine."""
    text = (ROOT / "docs" / "vllm.md").read_text()
    config = re.search(r"vllm serve MODEL --kv-transfer-config '(.*)'", text)[1]
    read = json.loads(config)
    for tier in read["kv_connector_extra_config"]["tiers"]:
        tier["bytes"] /= 1000
        if "path" in tier:
            tier["path"] = str(folder / "kv")
    return json.dumps(read)


def with_words(model):
    """Give a model a tokenizer of one word per token."""
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    return model


def free_port():
    """A port of the loopback device that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Command:
    """A server in a separate process, asked over HTTP.

    Args:
        model: the model's folder.
        transfer: the value of `--kv-transfer-config`.
        arguments: further ones of `vllm serve`.
        variables: further ones of its environment.
    """

    def __init__(self, model, transfer, *arguments, **variables):
        self.port = free_port()
        command = [str(Path(sys.executable).parent / "vllm"), "serve", model]
        command += ["--kv-transfer-config", transfer, "--port", str(self.port)]
        command += ["--block-size", str(BLOCK), "--enforce-eager", "--dtype", "float32"]
        command += ["--max-model-len", "640", "--enable-prompt-tokens-details", *arguments]
        env = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        env |= variables
        self.child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        self.lines = []

    def __enter__(self):
        for line in self.child.stdout:
            self.lines.append(line)
            if "Application startup complete" in line:
                self.listen()
                return self
        raise AssertionError(self.end())

    def __exit__(self, *error):
        self.end()

    def listen(self):
        """It listens a moment after it has said that it is there."""
        while self.child.poll() is None:
            with socket.socket() as one:
                if not one.connect_ex(("127.0.0.1", self.port)):
                    return

    def ask(self, prompt=PROMPT, tokens=8):
        """The answer, and how many tokens of the prompt were found."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body["model"] = json.loads(self.get("/v1/models"))["data"][0]["id"]
        request = Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answer = json.loads(self.send(request))
        found = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return answer["choices"][0]["text"], found

    def get(self, path, method="GET"):
        return self.send(Request(f"http://127.0.0.1:{self.port}{path}", method=method))

    def send(self, request):
        try:
            with urlopen(request, timeout=120) as answer:  # noqa: S310 - our own server
                return answer.read().decode()
        except OSError as error:
            raise AssertionError(self.end()) from error

    def end(self):
        """Its log; ending twice does nothing."""
        self.child.send_signal(signal.SIGTERM)
        self.lines += self.child.stdout
        self.child.wait()
        return "".join(self.lines)


def test_the_command_before_and_after_a_restart(tmp_path):
    model = with_words(servers.tiny_llama(tmp_path / "model"))
    with Command(model, settings(tmp_path)) as first:
        answer, found = first.ask()
        assert len(answer.split()) == 8
        assert found == 0
        assert first.ask() == (answer, 9 * BLOCK)
        log = first.end()
        assert log.count("kvtrie: host ") == 1  # one line per server
        assert ", 0 % filled by an earlier run; block" in log
    with Command(model, settings(tmp_path)) as second:
        assert second.ask() == (answer, 9 * BLOCK)
        metrics = second.get("/metrics")
        filled = re.search(r", (\d+) % filled by an earlier run; block", second.end())
        assert int(filled[1]) >= 0
    assert re.search(r'vllm:kvtrie_found_tokens_total\{.*tier="disk".*\} 288\.0', metrics)
