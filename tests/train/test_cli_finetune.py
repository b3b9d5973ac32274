"""The commands that fine-tune and evaluate: what they print and leave, and words they refuse."""

from __future__ import annotations

import json

import pytest
import torch

from kvtrie.cli import main
from kvtrie.cli.model import device


def test_the_command_runs_and_what_it_leaves_is_found(tmp_path, capsys):
    out = tmp_path / "out"
    data = ["--data", "Recall", "--data.cases", "9", "--data.words", "60"]
    cache = ["--kv_cache.name", "h2o-default", "--kv_cache.cache_length", "32"]
    cache += ["--kv_cache.chunk_size", "16"]
    more = ["--out_dir", str(out), "--train.micro_batch_size", "2", "--train.max_steps", "2"]
    more += ["--optimizer", "SGD", "--optimizer.momentum", "0.5", "--verbose", "all"]
    more += ["--optimizer.learning_rate", "0.1"]
    assert main(["finetune_long_lora", "tiny", *data, *cache, *more]) == 0
    printed = capsys.readouterr().out
    for part in ("step 1/2: loss", "tokens/s", "GB host", "left", "validation after step 2"):
        assert part in printed
    assert "weights trained" in printed
    assert {each.name for each in out.iterdir()} == {
        "loss.png", "metrics.jsonl", "run.json", "step-00000002",
    }  # fmt: skip
    assert main(["longcontext_eval", str(out), *data, *cache, "--split", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cases"] == 9
    # Settings that the words leave out are as in the run: the cache, and the data with its splits.
    assert main(["longcontext_eval", str(out), "--split", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["longcontext_eval", str(out), "--split", "test"]) == 2
    assert "no cases in the split test (train 8, validation 1, test 0)" in capsys.readouterr().err
    assert main(["longcontext_eval", str(out), "--kv_cache.cache_length", "40"]) == 0
    assert "h2o-default of 40 rows" in capsys.readouterr().out
    assert 0 < found["loss"] < 20
    assert 0 <= found["exact"] <= 1
    data += ["--split", "all"]
    assert main(["longcontext_eval", "tiny", *data, *cache, "--json"]) == 0
    data = data[:-2]
    assert json.loads(capsys.readouterr().out)["loss"] != found["loss"]
    assert main(["finetune_long_lora", "tiny", *data, *cache, *more]) == 2
    assert "holds a run of 2 steps" in capsys.readouterr().err
    assert main(["finetune_long_lora", "tiny", *data, *cache, "--plan"]) == 0
    plan = capsys.readouterr().out
    assert "cells" in plan
    assert "largest cache_length that fits" in plan
    assert main(["finetune_long_lora", "tiny", *data, *cache]) == 2
    assert "needs --out_dir" in capsys.readouterr().err


def test_all_keys_may_stand_in_a_file(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "head_model: seq_classification\n"
        "kv_cache: {name: h2o-default, cache_length: 32, chunk_size: 16}\n"
        "data: {class_path: Recall, init_args: {cases: 9, words: 60}}\n"
        "train: {micro_batch_size: 2, max_steps: 1}\n"
        "optimizer: {name: SGD, learning_rate: 0.1}\n"
        "eval: {final_validation: false}\n"
    )
    out = tmp_path / "out"
    words = ["finetune_offload_full", "tiny", "--config", str(file), "--out_dir", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "step 1/1: loss" in printed
    assert "SGD, rate 0.1" in printed
    assert (out / "step-00000001" / "head.pt").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetune_long_full", "--lora.r", "4"], "trains all weights and takes no --lora"),
        (["finetune_long_lora", "--plan_memory_gb", "4"], "takes effect with --plan only"),
        (["finetune_long_lora", "--device", "nowhere"], "--device nowhere: no device 'nowhere'"),
        (["longcontext_eval", "--device", "nowhere"], "--device nowhere: no device 'nowhere'"),
        (["generate", "--prompt", "a", "--device", "x"], "--device x: no device 'x'"),
    ],
)
def test_words_that_would_have_no_effect_are_refused(capsys, words, message):
    more = [] if words[0] in {"generate", "longcontext_eval"} else ["--out_dir", "none"]
    assert main([words[0], "tiny", *words[1:], *more]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_number_of_a_device_without_a_driver_is_one_error(capsys):
    assert main(["finetune_long_lora", "tiny", "--out_dir", "none", "--device", "0"]) == 2
    err = capsys.readouterr().err
    assert "--device 0: no device 'cuda:0' is available" in err
    assert err.count("\n") == 1


def test_the_first_accelerator_is_the_default_device(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda", 0)
    )
    assert device(None) == "cuda"
    monkeypatch.undo()
    if not torch.accelerator.is_available():
        assert device(None) == "cpu"
