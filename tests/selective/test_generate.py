"""`kvtrie generate`: prompts of any length on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtrie.cli import main

README = Path(__file__).parents[2] / "README.md"


def run(capsys, *words):
    status = main(["generate", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_long_prompt_is_read_in_steps(capsys):
    words = ("tiny", "--prompt_file", str(README), "--kv_cache.cache_length", "256")
    status, out, _ = run(capsys, *words, "--max_new_tokens", "3")
    assert status == 0
    answer, _, line = out.strip().splitlines()
    assert len(answer.split()) == 3
    assert "h2o-torch-quantized8: 0.20 MB of KV instead of" in line


def test_keys_come_from_a_file_and_from_words(capsys, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        "kv_cache:\n  name: keydiff-default\n  cache_length: 16\n  chunk_size: 4\n"
        "  cache_kwargs: {grace_period: 2}\nmax_new_tokens: 2\nprecision: bf16-true\n"
    )
    text = " ".join(map(str, range(40)))
    status, out, _ = run(capsys, "tiny", "--config", str(file), "--prompt", text)
    assert status == 0
    assert "40 tokens in 7 steps, keydiff-default: 0.02 MB" in out
    key = "--kv_cache.cache_kwargs.grace_period"
    status, out, _ = run(capsys, "tiny", "--config", str(file), "--prompt", text, key, "13")
    assert "40 tokens in 9 steps" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny",), "give a --prompt or a --prompt_file"),
        (("tiny", "--prompt", "a", "--kv_cache.name", "h3o-default"), "no policy 'h3o'"),
        (("tiny", "--prompt", "a", "--precision", "8"), "precision is one of 32-true"),
        (("tiny", "--prompt", ""), "the prompt has no tokens"),
        (("tiny", "--prompt_file", "no/such/file"), "cannot read no/such/file"),
        (("no/such/folder", "--prompt", "a"), "no causal language model 'no/such/folder'"),
        (("tiny", "--prompts", "a"), "--prompts"),
        (("tiny", "--prompt", "a", "--kv_cache.cache_length", "x"), "cache_length"),
    ],
)
def test_what_is_refused_is_said_in_a_line(capsys, monkeypatch, words, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
