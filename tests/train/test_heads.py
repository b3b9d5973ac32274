"""Heads: any split into steps is the whole, and the whole is torch's."""

from __future__ import annotations

import random

import pytest
import torch
from masked import compare, decisions, drawn, drawn_settings, grads, make, plain, worst

from kvtrie.errors import ConfigError
from kvtrie.selective import CacheSettings
from kvtrie.train import IGNORED, GradientSettings, HeadModel, LongContextGradients, make_head
from kvtrie.train.lora import LoraSettings, with_lora

CLOSE = 3e-5


@pytest.fixture(scope="module")
def llama():
    return make()


def targets_of(name, seed, width):
    if name == "next_token_prediction":
        return drawn(seed, total=width)
    return drawn(seed, total=1, vocabulary=4)


def pieces(head, outputs, targets, draw):
    """The losses of steps of drawn lengths, added up."""
    total, begin, at = outputs.shape[1], outputs.shape[1] - targets.shape[1], 0
    losses = torch.zeros(len(outputs))
    while at < total:
        end = min(total, at + draw.randint(1, 9))
        part = targets[:, max(0, at - begin) : end - begin] if end > begin else None
        losses = losses + head(outputs[:, at:end], part, at)
        at = end
    return losses


@pytest.mark.parametrize(
    "name", ["next_token_prediction", "seq_classification_on_logits", "seq_classification"]
)
def test_steps_add_up_to_the_whole_and_to_torch(llama, name):
    labels = None if name == "next_token_prediction" else [5, 9, [11], 2]
    torch.manual_seed(0)
    head = make_head(name, llama, labels)
    draw = random.Random(1)
    for seed in range(5):
        targets = targets_of(name, seed, 1 + 6 * seed)
        outputs = torch.randn(2, 30, 97 if head.needs_logits else 64)
        whole = head(outputs, targets, 0)
        assert (pieces(head, outputs, targets, draw) - whole).abs().max() < 1e-4
        entropy = torch.nn.functional.cross_entropy
        if name == "next_token_prediction":
            logits = outputs[:, 30 - targets.shape[1] :].transpose(1, 2)
            truth = entropy(logits, targets, reduction="none").sum(dim=1)
        elif head.needs_logits:
            truth = entropy(outputs[:, -1][:, [5, 9, 11, 2]], targets[:, 0], reduction="none")
        else:
            truth = entropy(head.linear(outputs[:, -1]), targets[:, 0], reduction="none")
        assert torch.allclose(whole, truth, atol=1e-5, rtol=1e-6)
        assert head.num_target_entries(targets).tolist() == [targets.shape[1]] * 2
    assert head(outputs, None, 0).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["seq_classification_on_logits", "seq_classification"])
def test_gradients_with_classes(llama, name):
    torch.manual_seed(0)
    head = make_head(name, llama, [5, 9, 11, 2])
    settings = drawn_settings("h2o-default", 3, grace_period=3)
    ids, targets = drawn(2), drawn(3, total=1, vocabulary=4)
    found = decisions(llama, settings, ids)
    outputs = plain(llama, ids, found, hidden=not head.needs_logits)
    outputs = llama.lm_head(outputs) if head.needs_logits and outputs.shape[-1] == 64 else outputs
    truth = head(outputs, targets, 0).mean()
    truth.backward()
    expected = grads(llama, head)
    tool = LongContextGradients(llama, head, settings, GradientSettings(2, 1.0))
    assert tool.gradients(ids, targets).item() == pytest.approx(truth.item(), abs=CLOSE)
    assert worst(grads(llama, head), expected) < CLOSE
    assert ("0.lm_head.weight" in expected) == head.needs_logits


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_of_adapters(seed):
    given = LoraSettings(key=True, projection=True, mlp=True, head=bool(seed))
    model = with_lora(make(), given).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(seed))
    settings = drawn_settings("h2o-default", seed, grace_period=3)
    assert compare(model, settings, seed, GradientSettings(2, 0.5), padded=True) < CLOSE


def test_dropout_is_the_same_in_all_phases():
    model = with_lora(make(), LoraSettings(dropout=0.5)).train()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    found = []
    ids = drawn(2)
    for grad in (GradientSettings(), GradientSettings(3, 1000)):
        torch.manual_seed(5)
        tool = LongContextGradients(
            model,
            make_head("next_token_prediction", model),
            CacheSettings("h2o-default", 14, 5),
            grad,
        )
        loss = tool.gradients(ids, ids)
        found.append((loss, grads(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert worst(found[0][1], found[1][1]) < 1e-6
    assert not torch.equal(tool.loss(ids, ids), loss)  # drawn again


class Counting(HeadModel):
    """Sees every output, from left to right, and keeps what came before."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, model_outputs, targets, input_pos):
        del targets
        if input_pos == 0:
            self.seen = 0
        assert self.seen == input_pos
        self.seen += model_outputs.shape[1]
        return model_outputs.float().square().mean(dim=(1, 2)) * model_outputs.shape[1]


def test_a_head_of_ones_own_sees_the_prompt(llama):
    ids, settings = drawn(2), CacheSettings("h2o-default", 14, 5)
    truth = plain(llama, ids, decisions(llama, settings, ids)).square().mean(dim=2).sum(dim=1) / 3
    truth.mean().backward()
    expected = grads(llama)
    head = Counting()
    tool = LongContextGradients(llama, head, settings)
    assert tool.gradients(ids, ids[:, :3]).item() == pytest.approx(truth.mean().item(), rel=1e-5)
    assert head.seen == 50
    assert worst(grads(llama), expected) < CLOSE * 10  # of gradients some ten times as large


@pytest.mark.parametrize(
    ("name", "labels", "said"),
    [
        ("other", None, "head_model is one of"),
        ("next_token_prediction", [1, 2], "2 labels given"),
        ("seq_classification", [1], "at least 2 labels, 1 given"),
        ("seq_classification_on_logits", None, "0 given"),
        ("seq_classification_on_logits", [1, [2, 3]], "label 1 has 2 tokens"),
        ("seq_classification_on_logits", [7, [7]], "share a token"),
    ],
)
def test_heads_that_cannot_be(llama, name, labels, said):
    with pytest.raises(ConfigError, match=said):
        make_head(name, llama, labels)


def test_ignored_targets_count_for_nothing(llama):
    head = make_head("next_token_prediction", llama)
    outputs, targets = torch.randn(2, 9, 97), drawn(1, total=9)
    targets[1, :4] = IGNORED
    assert head.num_target_entries(targets).tolist() == [9, 5]
    alone = head(outputs[1:, 4:], targets[1:, 4:], 4)
    assert torch.allclose(head(outputs, targets, 0)[1:], alone)
