"""Agents that call tools, with the middleware and without it: tokens found, equal answers.

A tokenizer of one token per byte lets a model of random weights write the JSON of a call.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request

import pytest
import servers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_command import Command

from kvtrie.engines.server.control_client import ask

ROOT = Path(__file__).parents[2]
MIDDLEWARE = ("--middleware", "kvtrie.engines.vllm.middleware.AgentHints")
TEMPLATE = (
    "{% set system = messages[0].content if messages and messages[0].role == 'system' else '' %}"
    "{{ '<|im_start|>system\n' + system + ('\n' + tools | tojson if tools else '') }}<|im_end|>"
    "{% for message in messages if message.role != 'system' %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)


def with_bytes(model):
    """Give a model a tokenizer of one token per byte and a template for chats with tools."""
    vocabulary = {each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<|im_start|>": 256, "<|im_end|>": 257}
    vocabulary |= {f"<|{at}|>": at for at in range(258, servers.VOCABULARY)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    ends = {"eos_token": "<|im_end|>"}
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **ends).save_pretrained(
        model
    )
    return model


def without_spaces(model):
    """Have a model choose white space last, of which grammars of JSON allow any amount.

    One feature is constant after every layer, and weighs against these tokens.
    """
    file = Path(model) / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = 0.1
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    spaces = PreTrainedTokenizerFast.from_pretrained(model)(" \t\n\r").input_ids
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][spaces, 0] = -1e5
    save_file(weights, file, metadata={"format": "pt"})
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents") / "model"
    return without_spaces(with_bytes(servers.tiny_llama(folder)))


def serve(model, folder, *arguments):
    """A server whose memory the agents fill, with a control socket."""
    extra = {"control": str(folder / "s"), "tiers": [{"kind": "host", "blocks": 96}]}
    transfer = {"kv_connector": "KvtrieConnector", "kv_role": "kv_both"}
    return Command(
        model,
        json.dumps({**transfer, "kv_connector_extra_config": extra}),
        *("--max-model-len", "2048", "--num-gpu-blocks-override", "96"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *arguments,
    )


def play(server, *arguments):
    """The report of `examples/agents` against a server."""
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-m", "examples.agents", url, "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-2000:] + server.end()[-4000:]
    return json.loads(ended.stdout)


def hints(server):
    """What the middleware has counted."""
    row = r'^vllm:kvtrie_client_hints_total\{hint="(.*)",outcome="(.*)"\} (\d+)\.0$'
    found = re.findall(row, server.get("/metrics"), re.MULTILINE)
    return {(hint, outcome): int(count) for hint, outcome, count in found}


def post(server, path, content, **headers):
    url = f"http://127.0.0.1:{server.port}{path}"
    head = {"Content-Type": "application/json", **headers}
    return server.send(Request(url, content.encode(), head))


def said(report):
    """The blocks of all answers, without ids that servers draw."""
    turns = [blocks for _, _, blocks in report["turns"]]
    return [[{**block, "id": None} for block in blocks] for blocks in turns]


def test_agents_find_more_tokens_with_the_middleware(model, tmp_path):
    with serve(model, tmp_path) as server:
        plain = play(server)
        assert hints(server) == {}
    with serve(model, tmp_path, *MIDDLEWARE) as server:
        marked = play(server)
        found = f"{plain['found']} without, {marked['found']} with, of {marked['prompt']}"
        sys.stdout.write(f"tokens found: {found}\n")
        play(server, "--plain", "--turns", "1")  # after which all commands were sent
        turns, counted = len(marked["turns"]), hints(server)
        assert counted == dict.fromkeys([("session", "mapped"), ("retain", "mapped")], turns) | {
            ("pause", "mapped"): turns
        }
        commands = ask(str(tmp_path / "s"), "/stats")["commands"]
        assert commands["applied"] >= turns
        assert (commands["waiting"], commands["failed"]) == (0, 0)
        play_recorded(server)
    assert said(marked) == said(plain)
    assert marked["prompt"] == plain["prompt"]
    assert marked["found"] >= 1.5 * plain["found"]


def play_recorded(server):
    """Requests of clients' libraries are answered, streams to their end."""
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    for one in json.loads((ROOT / "tests" / "engines" / "client_requests.json").read_text()):
        body = json.loads(one["body"]) | {"model": model, "max_tokens": 8, "max_output_tokens": 8}
        answer = post(server, one["path"], json.dumps(body), **one["headers"])
        if body.get("stream"):
            assert answer.rstrip().endswith(("[DONE]", '{"type":"message_stop"}'))
        else:
            assert json.loads(answer)["model"] == model
