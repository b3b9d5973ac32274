"""`kvtrie calibrate`: the cost of each format, and the file that says it."""

import json

import pytest
import torch

from kvtrie import BlockManager
from kvtrie.cli import main
from kvtrie.demo.model import tiny
from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.engines.transformers.calibration import calibrate, prompts_of
from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS


@pytest.fixture(scope="module")
def model():
    return tiny(heads=4).model


def test_native_costs_nothing_and_fewer_bits_cost_more(model):
    ids = torch.arange(1, 129)[None] % 250
    seen = []
    costs = calibrate(model, [ids, ids.flip(1)], on_step=seen.append)
    assert seen == list(costs) == list(FORMATS)
    assert (costs["native"].kl_mean, costs["native"].kl_p99, costs["native"].top1) == (0, 0, 1)
    kl = {name: cost.kl_mean for name, cost in costs.items()}
    assert 0 < kl["int8"] < kl["fp8"] < kl["int4"] < 0.1
    for cost in costs.values():
        assert cost.kl_mean <= cost.kl_p99
        assert 0 <= cost.top1 <= 1
    assert costs["native"].of_bf16 == 2  # float32
    assert costs["int4"].of_bf16 < 0.4 < costs["int8"].of_bf16 == costs["fp8"].of_bf16 < 0.7


def test_tokens_that_are_computed_keep_their_format(model):
    ids = torch.arange(1, 129)[None] % 250
    all_loaded, some = calibrate(model, [ids]), calibrate(model, [ids], native_last=64)
    assert some["native"].kl_mean == 0
    assert 0 < some["int4"].kl_mean < all_loaded["int4"].kl_mean
    assert some["int4"].of_bf16 == all_loaded["int4"].of_bf16
    with pytest.raises(ConfigError, match="a prompt of 128 tokens, 166 wanted"):
        calibrate(model, [ids], native_last=96)


def test_blocks_of_the_first_tokens_stay_in_the_first_tier(model, monkeypatch):
    ids = torch.arange(1, 129)[None] % 250
    left, evict = [], BlockManager.evict

    def noting(self, count, tier, *, now):
        evict(self, count, tier, now=now)
        matched = self.lookup(ids[0].numpy(), now=now).blocks
        left.append([any(copy.tier == 0 for copy in block.copies) for block in matched])

    monkeypatch.setattr(BlockManager, "evict", noting)
    all_loaded, some = calibrate(model, [ids]), calibrate(model, [ids], native_first=17)
    # Six blocks of 16 tokens: none is left in the first tier, or the first two.
    assert [each.count(True) for each in left] == [0] * len(FORMATS) + [2] * len(FORMATS)
    assert all(each[:2] == [True, True] for each in left[len(FORMATS) :])
    assert 0 < some["int4"].kl_mean < all_loaded["int4"].kl_mean
    assert [each["int4"].tokens for each in (all_loaded, some)] == [96, 64]


# A prompt of 128 tokens has 8 blocks, of which 6 are stored.
@pytest.mark.parametrize(
    ("settings", "wanted", "stored"),
    [
        ({"native_first": 96}, 166, "6 of its blocks are stored, of which 6 stay"),
        ({"native_first": 2**20}, 1398139, "6 of its blocks are stored, of which 65536 stay"),
        ({"native_first": 64, "native_last": 32}, 166, "4 of its blocks are stored, of which 4"),
        ({"native_last": 2**20}, 1398139, "0 of its blocks are stored, so nothing"),
    ],
)
def test_prompts_that_would_measure_nothing_are_refused(model, settings, wanted, stored):
    ids = torch.arange(1, 129)[None] % 250
    with pytest.raises(ConfigError, match=f"a prompt of 128 tokens, {wanted} wanted: {stored}"):
        calibrate(model, [ids, ids], **settings)
    with pytest.raises(ConfigError, match="prompts is empty, at least one wanted"):
        calibrate(model, [], **settings)


def test_one_block_that_comes_back_is_measured(model):
    ids = torch.arange(1, 129)[None] % 250
    costs = calibrate(model, [ids], native_first=80)
    assert costs["int4"].kl_mean > 0
    assert {cost.tokens for cost in costs.values()} == {16}


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    (tmp_path / "text").write_text("ferry harbour archive " * 120)
    words = ["calibrate", "tiny", "--texts", str(tmp_path / "text"), "--tokens", "96"]
    words += [
        "--prompts",
        "2",
        "--native-last",
        "32",
        "--native-first",
        "4",
        "--out",
        str(tmp_path / "made.json"),
        "--device",
        "cpu",
    ]
    assert main(words) == 0
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["fingerprint"] == fingerprint(tiny(heads=4).model)
    assert (made["prompts"], made["tokens"], made["block_tokens"]) == (2, 192, 16)
    assert (made["native_last"], made["native_first"]) == (32, 4)
    # Of 64 stored tokens the last 32 are computed, and the first block keeps the model's format.
    assert {row["tokens"] for row in made["formats"].values()} == {32}
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:5]] == list(made["formats"])
    assert "192 tokens in 2 prompts of 96" in printed


def test_a_text_is_cut_into_prompts():
    tokens = list(range(300))
    assert [each.shape for each in prompts_of(tokens, 128, 8)] == [(1, 128)] * 2
    assert [each.shape for each in prompts_of(tokens, 512, 8)] == [(1, 300)]
    assert [each[0, 0].item() for each in prompts_of(tokens, 100, 2)] == [0, 100]
    with pytest.raises(ConfigError, match="the text has 63 tokens, at least 64 wanted"):
        prompts_of(tokens[:63], 128, 8)


def test_a_text_that_cannot_be_read_is_refused(tmp_path, capsys):
    assert main(["calibrate", "tiny", "--texts", str(tmp_path / "none"), "--device", "cpu"]) == 2
    assert "cannot read" in capsys.readouterr().err
