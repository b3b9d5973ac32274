"""`kvtrie ctl` and `kvtrie why` against a control socket."""

from __future__ import annotations

import io
import json
import socket
import threading

import numpy as np
import pytest

from kvtrie import BlockManager, ModelShape, Scope, Tier
from kvtrie.cli import main
from kvtrie.engines.server.show_text import marked
from kvtrie.engines.server.why import Admitted, MissCounter

TEXT = np.arange(1000, 1400, dtype=np.uint32)


@pytest.fixture
def served(tmp_path):
    pytest.importorskip("uvicorn", reason="the control socket needs uvicorn and starlette")
    from kvtrie.engines.server.control import Controlled, ControlSocket

    shape = ModelShape(layers=1, kv_heads=1, head_dim=4)
    manager = BlockManager(shape, [Tier("gpu", blocks=64)], block_tokens=16, explain=True)
    with manager.acquire(TEXT, now=1, keep=0) as lease:
        lease.commit(TEXT, now=1)
        lease.release(now=1)
    why = MissCounter(manager, min_tokens=0, per_second=20)
    engine = Controlled(manager, why, dict, {})
    control = ControlSocket(str(tmp_path / "kv.sock"), engine)
    yield engine, control.path
    control.close()
    why.close()


def run(capsys, *words):
    status = main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def test_ctl_reads_counters_and_queues_commands(served, capsys, monkeypatch):
    engine, path = served
    status, out, _ = run(capsys, "ctl", path, "stats")
    assert (status, json.loads(out)["manager"]["tiers"]["gpu"]["slots"]) == (0, 64)
    assert json.loads(run(capsys, "ctl", f"unix://{path}", "limits")[1])["block_tokens"] == 16
    assert run(capsys, "ctl", path, "release", "--session", "chat 7")[:2] == (0, '{"waiting": 1}\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2, 3]"))
    ranges = '[{"priority": 90}]'
    assert run(capsys, "ctl", path, "retain", "--tokens", "-", "--ranges", ranges)[0] == 0
    assert run(capsys, "ctl", path, "drop", "--tokens", "[1]", "--salt", "s")[0] == 0
    assert run(capsys, "ctl", path, "reset")[0] == 0
    assert len(engine.commands) == 4


def test_errors_of_the_server_and_of_the_path_are_one_line(served, capsys, tmp_path):
    _, path = served
    status, out, err = run(capsys, "ctl", path, "release")
    assert (status, out) == (2, "")
    assert "one of session, tokens" in err
    assert "none of the last requests" in run(capsys, "ctl", path, "why", "chatcmpl-1")[2]
    assert "--tokens is no JSON" in run(capsys, "ctl", path, "drop", "--tokens", "[1")[2]
    status, _, err = run(capsys, "ctl", str(tmp_path / "none"), "stats")
    assert (status, "is the server running?" in err, err.count("\n")) == (2, True, 1)


def test_another_server_on_the_socket_is_an_error(capsys, tmp_path):
    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def answer():
            one, _ = server.accept()
            one.recv(1000)
            one.sendall(b"SSH-2.0\r\n")
            one.close()

        thread = threading.Thread(target=answer)
        thread.start()
        status, _, err = run(capsys, "ctl", path, "stats")
        thread.join()
    assert (status, "does not answer as a control socket" in err) == (2, True)


def test_why_lists_causes_and_divergence_points(served, capsys):
    engine, path = served
    assert "no prompt has diverged" in run(capsys, "why", path)[1]
    asked = np.insert(TEXT, 37, 7).astype(np.uint32)
    engine.why.admitted(Admitted("a", asked, Scope(), session="chat"), 32, 10**9)
    engine.why.drain()
    _, out, _ = run(capsys, "why", path)
    assert "diverged" in out
    assert "1. 363 recurring tokens computed by 1 requests that part at token 37 of 401" in out
    assert "session chat" in out
    assert "cached  1037 1038" in out
    assert "asked   7 1037" in out
    found = json.loads(run(capsys, "why", path, "--json")[1])
    assert found["breakers"][0]["position"] == 37
    assert json.loads(run(capsys, "ctl", path, "why", "a")[1])["computed"] == 369


@pytest.mark.parametrize(
    ("kl", "tokens", "said"),
    [
        (2e-4, 768, "in int8, mean KL 2.00e-04 nats over 768 tokens\n"),
        (2e-4, None, "in int8, mean KL 2.00e-04 nats\n"),
        (None, None, "in int8, mean KL not measured\n"),
    ],
)
def test_why_names_the_format_of_found_tokens_and_its_cost(served, capsys, kl, tokens, said):
    engine, path = served
    assert "format" not in json.loads(run(capsys, "why", path, "--json")[1])
    engine.settings["format"] = {"name": "int8", "kl_mean": kl, "tokens": tokens}
    assert json.loads(run(capsys, "why", path, "--json")[1])["format"]["kl_mean"] == kl
    assert said in run(capsys, "why", path)[1]


def test_no_text_of_a_client_reaches_the_terminal_as_it_is(served, capsys):
    engine, path = served
    evil = "\x1b]0;mine\x07\x1b[2J\nno prompt has diverged"
    asked = np.insert(TEXT, 37, 7).astype(np.uint32)
    engine.why.admitted(Admitted(evil, asked, Scope(), evil), 32, 10**9)
    engine.why.drain()
    for words in (["why", path], ["why", path, "--json"], ["ctl", path, "why", evil]):
        out = run(capsys, *words)[1]
        assert out.replace("\n", "").isprintable()
        assert "no prompt has diverged" not in out.splitlines()
    assert r"session \x1b]0;mine\x07\x1b[2J\nno prompt" in run(capsys, "why", path)[1]
    err = run(capsys, "ctl", path, "why", "other" + evil)[2]
    assert (err.count("\n"), err.strip().isprintable()) == (1, True)


def test_show_text_decodes_with_the_models_tokenizer(served, capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{token}": token for token in range(1500)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))  # noqa: S106 - a word
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "m")
    engine, path = served
    asked = np.insert(TEXT, 37, 7).astype(np.uint32)
    engine.why.admitted(Admitted("a", asked, Scope()), 32, 10**9)
    engine.why.drain()
    _, out, _ = run(capsys, "why", path, "--show-text", str(tmp_path / "m"))
    assert "w1036 w>>><<<1037 w1038" in out
    assert "w1036 w>>>7 w<<<1037 w1038" in out
    status, _, err = run(capsys, "why", path, "--show-text", str(tmp_path / "none"))
    assert (status, "--show-text is" in err) == (2, True)


@pytest.mark.parametrize(
    ("cached", "asked", "sides"),
    [
        (
            "Today is 2026-11-25. Use the tools.",
            "Today is 2026-11-26. Use the tools.",
            (
                "Today is 2026-11-2>>>5<<<. Use the tools.",
                "Today is 2026-11-2>>>6<<<. Use the tools.",
            ),
        ),
        ("a" * 60 + "x", "a" * 60 + "\n", ("a" * 40 + ">>>x<<<", "a" * 40 + ">>>\\n<<<")),
        ("same", "same and more", ("same>>><<<", "same>>> and more<<<")),
    ],
)
def test_the_difference_is_marked_with_forty_characters_around(cached, asked, sides):
    assert marked(cached, asked) == sides
