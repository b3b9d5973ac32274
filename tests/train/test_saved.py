"""Checkpoints of a run: adapters, heads and settings, read again."""

from __future__ import annotations

import shutil

import pytest
import torch
from masked import drawn, make
from peft import PeftModel
from tuning import tuned

from kvtrie.errors import ConfigError
from kvtrie.train import (
    make_head,
)
from kvtrie.train.saved import Saved


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own
def test_adapters_are_what_peft_opens(tmp_path):
    found = tuned(tmp_path)
    folder = tmp_path / "step-00000003" / "adapter"
    opened = PeftModel.from_pretrained(make(), str(folder)).eval()
    ids = drawn(1)
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, found.model.eval()(ids).logits)
        merged = Saved(tmp_path).merged(make())
        assert (merged(ids).logits - opened(ids).logits).abs().max() < 1e-4


def test_a_head_of_classes_is_trained_and_found_again(tmp_path):
    found = tuned(tmp_path, head_model="seq_classification")
    torch.manual_seed(9)
    head = make_head("seq_classification", make(), list(range(8)))
    before = head.linear.weight.clone()
    Saved(tmp_path).load_head(3, head)
    assert not torch.equal(head.linear.weight, before)
    assert found.steps == 3
    assert not any(
        weight.requires_grad for weight in found.model.get_output_embeddings().parameters()
    )


def test_what_does_not_belong_together_is_refused(tmp_path):
    tuned(tmp_path / "a")
    with pytest.raises(ConfigError, match="fingerprint"):
        tuned(tmp_path / "a", seed=1, resume=True)
    with pytest.raises(ConfigError, match="mode"):
        tuned(tmp_path / "a", "finetune_long_full", resume=True)
    with pytest.raises(ConfigError, match="no run"):
        tuned(tmp_path / "b", resume=True)


def test_a_folder_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ConfigError, match="has room for 0 MB"):
        tuned(tmp_path)
