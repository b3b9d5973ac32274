"""`kvtrie generate`: prompts of any length on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import make
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvtrie.cli import main
from kvtrie.selective import CacheSettings, generate

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


def test_a_model_comes_from_a_folder(capsys, tmp_path):
    """As `save_pretrained` leaves it, with its tokenizer."""
    words = {"[UNK]": 0, **{str(n): n + 1 for n in range(60)}}
    inner = Tokenizer(WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")  # noqa: S106
    tokenizer.save_pretrained(tmp_path)
    model = make(vocab_size=61, max_position_embeddings=64)
    model.save_pretrained(tmp_path)
    given = ("--kv_cache.name", "lastrec-default", "--kv_cache.cache_length", "32")
    text = " ".join(str(n % 60) for n in range(200))
    said = []
    for more in ((), ("--yarn_rope", "false")):
        status, out, _ = run(capsys, str(tmp_path), "--prompt", text, *given, *more)
        assert status == 0
        assert f"{tmp_path}: a prompt of 200 tokens" in out
        said.append(out)
    assert said[0] != said[1]  # beyond 64 trained tokens RoPE is scaled, or it is not
    ids = torch.tensor([[n % 60 + 1 for n in range(200)]])
    settings = CacheSettings("lastrec-default", 32)
    made = generate(model, ids, settings, max_new_tokens=50, do_sample=False)[0, 200:]
    assert said[0].split("\n")[0].split() == [str(n - 1) for n in made.tolist() if n]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny",), "give a --prompt or a --prompt_file"),
        (("tiny", "--prompt", "a", "--kv_cache.name", "h3o-default"), "no policy 'h3o'"),
        (("tiny", "--prompt", "a", "--precision", "8"), "precision is one of 32-true"),
        (("tiny", "--prompt", ""), "the prompt has no tokens"),
        (("tiny", "--prompt_file", "no/such/file"), "cannot read the prompt no/such/file"),
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


def test_answers_are_drawn_by_a_seed(capsys):
    given = (
        "tiny",
        "--prompt",
        "a b c d",
        "--kv_cache.name",
        "h2o-default",
        "--max_new_tokens",
        "6",
    )

    def drawn(*more):
        status, out, err = run(capsys, *given, *more)
        assert (status, err) == (0, "")
        return out.split("\n\n")[:-1]

    greedy = drawn()
    assert drawn("--temperature", "0") == greedy
    assert drawn("--top_k", "1") == greedy
    assert drawn("--temperature", "2", "--top_p", "1e-9") == greedy
    warm = ("--temperature", "3", "--num_samples", "3")
    one, two = drawn(*warm, "--seed", "1"), drawn(*warm, "--seed", "2")
    assert len(set(one)) == 3
    assert one == drawn(*warm, "--seed", "1")
    assert one != two
    status, _, err = run(capsys, *given, "--temperature", "0", "--top_k", "3")
    assert status == 2
    assert "so top_k would have no effect" in err
