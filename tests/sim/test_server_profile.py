"""A served engine is measured from outside: figures by hand, and servers that lie or fail."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvtrie.cli import main
from kvtrie.errors import ConfigError, TransferError
from kvtrie.sim.completions import Answer, Server
from kvtrie.sim.passes import read_passes
from kvtrie.sim.server_profile import profile_server

REQUEST, BASE, TOKEN, DECODE, BLOCK = 3_000, 10_000, 50, 200, 16


class Engine:
    """An engine with a clock of its own: a step has a fixed time, and one per token."""

    def __init__(self):
        self.cached = set()
        self.decoding = 1
        self.asked = []

    def answer(self, prompt, tokens):
        """The times of a prompt whose beginning may be cached, in blocks."""
        found = 0
        for end in range(BLOCK, len(prompt), BLOCK):
            if tuple(prompt[:end]) in self.cached:
                found = end
            self.cached.add(tuple(prompt[:end]))
        self.asked.append((len(prompt), found))
        computed = len(prompt) - found
        first = REQUEST + BASE + TOKEN * (computed if computed > 1 else 0)
        step = BASE + DECODE * (len(prompt) > 1)
        return Answer(0, tuple(first + step * at for at in range(tokens)), tokens, found)


def test_a_profile_is_the_engine_s_own_times():
    engine = Engine()
    steps = []
    measured = profile_server(engine, longest=128, requests=(1, 2), repeats=2, on_step=steps.append)
    assert measured["server"] == {"request_ns": REQUEST}
    passes = measured["passes"]
    assert (passes["contexts"], passes["tokens"]) == ([0, 64], [1, 4, 16, 64])
    cold, warm = passes["ns"]
    assert cold == [BASE, *(BASE + TOKEN * count for count in (4, 16, 64))]
    # The context is found to its last full block.
    assert warm == [BASE, *(BASE + TOKEN * count for count in (4, 16, 64))]
    assert measured["decode"]["ns"] == [[BASE] * 2, [BASE + DECODE] * 2]
    assert {found for length, found in engine.asked if length < 65} == {0}
    assert {found for length, found in engine.asked if length > 65} == {64}
    assert len(steps) == len(set(steps)) == 1 + 2 * 2 * (2 + 4)


def test_a_length_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match="longest is 8 tokens, at least 64 wanted"):
        profile_server(Engine(), longest=8)


class Handler(BaseHTTPRequestHandler):
    """Streams the tokens that it is asked for, or what `script` says."""

    script = "tokens"

    def do_GET(self):
        self.reply(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.script == "refused":
            self.reply("no token ids here", 400)
            return
        rows = [{"choices": [{"text": ""}]}] * body["max_tokens"]
        made = body["max_tokens"] - (self.script == "short")
        details = {"cached_tokens": 7}
        rows.append({"usage": {"completion_tokens": made, "prompt_tokens_details": details}})
        text = "".join(f"data: {json.dumps(row)}\n\n" for row in rows)
        self.reply("data: {" if self.script == "cut" else text + "data: [DONE]\n\n")

    def reply(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving(script="tokens"):
    handler = type("Scripted", (Handler,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_an_answer_has_a_time_per_part():
    with serving() as url:
        answer = Server(url + "/v1/").answer([1, 2, 3], 5)
    assert (len(answer.parts), answer.tokens, answer.cached) == (5, 5, 7)
    assert answer.sent <= answer.parts[0] <= answer.parts[-1]
    assert answer.first_ns == answer.parts[0] - answer.sent


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("refused", ConfigError, "answers 400: no token ids here"),
        ("short", TransferError, "streamed 4 of 5 tokens"),
        ("cut", TransferError, "completions: JSONDecodeError"),
    ],
)
def test_a_server_that_lies_or_refuses_is_an_error(script, error, said):
    with serving(script) as url, pytest.raises(error, match=said):
        Server(url).answer([1], 5)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="a URL as http://localhost:8000 wanted"):
        Server(url)


def test_a_server_that_is_not_there_is_an_error(capsys):
    with serving() as url:
        pass
    with pytest.raises(TransferError, match=r"/v1/models: ConnectionRefused"):
        Server(url).answer([1], 1)
    assert main(["profile", "--server", url]) == 2
    assert "--server: http://127.0.0.1" in capsys.readouterr().err


def test_the_command_profiles_a_server(tmp_path, capsys, monkeypatch):
    # Answers of a server that takes no time are never made together.
    engine = Engine()
    monkeypatch.setattr(Server, "answer", lambda _, prompt, tokens: engine.answer(prompt, tokens))
    out = tmp_path / "p.toml"
    words = ["--longest", "64", "--blocks", "2", "--repeats", "2", "--out", str(out)]
    with serving() as url:
        assert main(["profile", "--server", url, *words]) == 0
    assert "request_ns" in capsys.readouterr().out
    passes = read_passes(out)
    assert passes.prefill[:2] == ([0, 32], [1, 4, 16, 32])
    assert passes.decode[:2] == ([0, 32], [1, 4, 16, 32])
    assert passes.price()[3] == passes.request == REQUEST
