"""Runs: all modes, going on, several processes, and a loss that is no number."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from masked import drawn, grads, make, worst
from safetensors.torch import load_file
from tuning import run, tuned, words

from kvtrie.errors import ConfigError
from kvtrie.selective import CacheSettings
from kvtrie.train import (
    EvalSettings,
    GradientSettings,
    LongContextGradients,
    LoraSettings,
    OptimizerSettings,
    Recall,
    TrainSettings,
    make_head,
)
from kvtrie.train.optimisers import OPTIMISERS, make_optimizer
from kvtrie.train.residence import Offloaded
from kvtrie.train.run import MODES
from kvtrie.train.saved import Saved
from kvtrie.train.steps import Steps


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Of four steps of each mode, in one go."""
    train = TrainSettings(micro_batch_size=2, max_steps=4, save_interval=2)
    folder = tmp_path_factory.mktemp("whole")
    return {mode: tuned(folder / mode, mode, train=train).losses for mode in MODES}


def test_offloading_changes_nothing(losses):
    for kind in ("lora", "full"):
        assert losses[f"finetune_offload_{kind}"] == losses[f"finetune_long_{kind}"]
    assert losses["finetune_long_full"][-1] < losses["finetune_long_full"][0]
    assert losses["finetune_long_lora"] != losses["finetune_long_full"]


@pytest.mark.parametrize("mode", MODES[:2])
def test_a_run_goes_on_to_the_same_losses(tmp_path, losses, mode):
    train = TrainSettings(micro_batch_size=2, max_steps=4, save_interval=2)
    with pytest.MonkeyPatch.context() as patch:
        step = LongContextGradients.gradients
        calls = []

        def killed(tool, *given, **more):
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return step(tool, *given, **more)

        patch.setattr(LongContextGradients, "gradients", killed)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path, mode, train=train)
    assert Saved(tmp_path).steps() == [2]
    found = tuned(tmp_path, mode, train=train, resume=True)
    assert found.losses == losses[mode][2:]
    lines = [json.loads(each) for each in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [each["loss"] for each in lines] == losses[mode]
    assert [each["step"] for each in lines] == [1, 2, 3, 4]
    assert Saved(tmp_path).steps() == [2, 4]


def test_the_rate_rises_over_steps_or_a_share_of_them(tmp_path):
    data = Recall(cases=20, words=60, facts=3, val_split_fraction=0.0)
    data.prepare(words)
    share = {"epochs": 2, "lr_warmup_fraction": 0.25}
    for given, rising in ((share, 5), ({"max_steps": 8}, 4), ({"lr_warmup_steps": 3}, 3)):
        train = TrainSettings(micro_batch_size=2, **({"epochs": 2} | given))
        steps = Steps(run(tmp_path, train=train), data)
        assert steps.total == given.get("max_steps", 20)
        factors = [steps.factor(at) for at in range(steps.total)]
        assert factors[:rising] == [(at + 1) / (rising + 1) for at in range(rising)]
        assert factors[rising] == 1
        assert factors[rising:] == sorted(factors[rising:], reverse=True)
        assert 0 < factors[-1] < 0.2


def test_a_run_ends_when_its_time_is_over(tmp_path):
    train = TrainSettings(micro_batch_size=2, max_steps=3, max_time=0.0)
    assert len(tuned(tmp_path, train=train).losses) == 1
    assert Saved(tmp_path).steps() == [1]


@pytest.mark.parametrize("tied", [None, True])
def test_embeddings_may_be_tied(tmp_path, tied):
    train = TrainSettings(micro_batch_size=2, max_steps=1, tie_embeddings=tied)
    model = tuned(tmp_path, "finetune_long_full", train=train).model
    one, other = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert torch.equal(one, other) == bool(tied)


def test_a_line_may_stand_for_several_steps(tmp_path):
    said = []
    train = TrainSettings(micro_batch_size=2, max_steps=5, log_interval=2)
    tuned(tmp_path, train=train, write=said.append)
    steps = [part.split("/")[0] for part in "".join(said).split("step ")[1:] if "/5" in part]
    assert steps == ["2", "4"]


def test_layers_on_their_way_have_the_same_gradients():
    model, ids = make(), drawn(3)
    head = make_head("seq_classification", model, [1, 2, 3])
    targets = drawn(4, total=1, vocabulary=3)
    plain = LongContextGradients(model, head, CacheSettings("h2o-default", 14, 5))
    plain.gradients(ids, targets)
    expected = grads(model, head)
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    device = torch.device("cpu")
    moved = LongContextGradients(
        model,
        head,
        CacheSettings("h2o-default", 14, 5),
        GradientSettings(2, 1.0),
        residence=Offloaded(plain.decoder, head, device),
    )
    for _ in range(2):
        moved.gradients(ids, targets, 0.5)
    assert worst(grads(model, head), expected) < 1e-6
    assert weights == {name: weight.data_ptr() for name, weight in model.named_parameters()}


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, monkeypatch):
    real, calls = LongContextGradients.gradients, []

    def broken(tool, *given, **more):
        calls.append(1)
        loss = real(tool, *given, **more)
        return loss * float("nan") if len(calls) == 3 else loss

    monkeypatch.setattr(LongContextGradients, "gradients", broken)
    with pytest.raises(ConfigError, match=r"loss of step 3 is nan.*checkpoint is of step 2"):
        tuned(tmp_path)
    assert Saved(tmp_path).steps() == [2]


def test_optimisers_take_what_they_are_given():
    weight = torch.nn.Parameter(torch.zeros(3))
    for name, kind in OPTIMISERS.items():
        made = make_optimizer([weight], OptimizerSettings(name))
        assert type(made) is kind
        assert made.defaults == kind([weight]).defaults
    given = OptimizerSettings("RMSprop", learning_rate=0.5, rmsprop_alpha=0.7, momentum=0.1)
    found = make_optimizer([weight], given).defaults
    assert (found["lr"], found["alpha"], found["momentum"]) == (0.5, 0.7, 0.1)
    found = make_optimizer([weight], OptimizerSettings("Adadelta", adadelta_rho=0.8)).defaults
    assert found["rho"] == 0.8


def shared(folder, devices):
    """A run whose passes have one sequence each, all of unequal lengths."""
    train = TrainSettings(1, global_batch_size=4, max_steps=2)
    optimizer = OptimizerSettings("SGD", learning_rate=0.1)
    lora = LoraSettings(dropout=0.0)
    return tuned(folder, train=train, optimizer=optimizer, lora=lora, devices=devices)


def trained(model):
    return torch.cat([each.flatten() for each in model.parameters() if each.requires_grad])


def test_two_processes_have_the_gradients_of_one(tmp_path, monkeypatch):
    """By gloo: this process and another one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    script = "import sys, test_finetune as t; t.shared(sys.argv[1], 2)"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.getenv("PYTHONPATH")])])
    environment = {"RANK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "two")], env=os.environ | env | environment
    )
    one = shared(tmp_path / "one", 1)
    for name, value in {**env, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    two = shared(tmp_path / "two", 2)
    assert other.wait() == 0
    assert (trained(one.model) - trained(two.model)).abs().max() < 1e-6
    assert two.losses == pytest.approx(one.losses, abs=1e-6)


@pytest.mark.deep
def test_devices_are_processes_of_torchrun(tmp_path):
    data = ["--data", "Recall", "--data.cases", "9", "--data.words", "60"]
    cache = ["--kv_cache.name", "h2o-default", "--kv_cache.cache_length", "32"]
    cache += ["--kv_cache.chunk_size", "16", "--train.max_steps", "2", "--lora.dropout", "0"]
    cache += ["--train.global_batch_size", "2", "--eval.final_validation", "False"]
    cache += ["--train.micro_batch_size", "1"]
    env, found = os.environ | {"OMP_NUM_THREADS": "1"}, []
    for devices in ("1", "2"):
        out = tmp_path / devices
        command = [sys.executable, "-m", "kvtrie", "finetune_long_lora", "tiny"]
        command += [*data, *cache, "--out_dir", str(out), "--devices", devices]
        subprocess.run(command, env=env, check=True)
        found.append(load_file(str(out / "step-00000002/adapter/adapter_model.safetensors")))
    one, two = found
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-6


@pytest.mark.parametrize(("bits", "least"), [(8, 0.999), (4, 0.95)])
def test_coded_checkpoints_point_the_same_way(bits, least):
    model, ids = make(), drawn(3, size=2, total=100)
    name, found, sizes = f"torch-quantized{bits}", [], []
    for given in (None, name):
        tool = LongContextGradients(
            model,
            make_head("next_token_prediction", model),
            CacheSettings("h2o-default", 24, 6),
            GradientSettings(1, 1.0, given, given),
        )
        tool.gradients(ids, ids[:, -20:])
        found.append(torch.cat([each.flatten() for each in grads(model).values()]))
        sizes.append(tool.checkpoint_bytes)
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > least
    assert sizes[1] < sizes[0]


def test_gradients_are_cut_to_a_norm(tmp_path):
    norms = []

    class Noting(torch.optim.SGD):
        def step(self, *given):
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            norms.append(float(torch.nn.utils.get_total_norm([g for g in grads if g is not None])))
            return super().step(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMISERS, "SGD", Noting)
        for most in (None, 1e-3):
            train = TrainSettings(micro_batch_size=2, max_steps=1, max_norm=most)
            optimizer = OptimizerSettings("SGD", learning_rate=1e-2)
            tuned(tmp_path / str(most), train=train, optimizer=optimizer)
    assert norms[0] > 1e-3
    assert norms[1] == pytest.approx(1e-3, rel=1e-3)


def test_the_rate_ends_at_the_least_and_steps_at_the_most_tokens(tmp_path):
    data = Recall(cases=20, words=60, facts=3, val_split_fraction=0.0)
    data.prepare(words)
    given = {"micro_batch_size": 2, "epochs": 2, "lr_warmup_steps": 2}
    steps = Steps(run(tmp_path, train=TrainSettings(**given, min_lr=1e-3)), data)
    rates = [steps.rate(at, 1e-2) for at in range(steps.total)]
    assert rates[:2] == pytest.approx([1e-2 / 3, 2e-2 / 3])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 1e-3 <= rates[-1] < 1.2e-3
    lengths = dict(zip(data.train.places, data.train.lengths, strict=True))
    three = sum(lengths[place] for at in range(3) for place in steps.batch(at))
    for tokens, wanted in ((three, 3), (three + 1, 4), (three - 1, 3), (1, 1), (10**9, 20)):
        train = TrainSettings(**given, max_tokens=tokens)
        assert Steps(run(tmp_path, train=train), data).total == wanted
    with pytest.raises(ConfigError, match=r"min_lr is 1, above the learning rate 0\.01"):
        tuned(tmp_path, train=TrainSettings(micro_batch_size=2, min_lr=1))


def test_an_answer_is_written_behind_a_validation(tmp_path):
    said = []
    eval_settings = EvalSettings(max_new_tokens=4)
    train = TrainSettings(micro_batch_size=2, max_steps=1)
    found = tuned(tmp_path, train=train, eval=eval_settings, write=said.append)
    (line,) = [each for each in said if "answer to Recall, case" in each]
    assert len(line.split(": ")[1].split()) == 4
    assert found.model.training
    with pytest.raises(ConfigError, match="answers with a class"):
        run(tmp_path, eval=eval_settings, head_model="seq_classification")
