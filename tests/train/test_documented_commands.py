"""Commands of docs/train.md run as they are written; keys of the command line are those of classes.

Stand-ins take the places of the two downloads: a tiny model of the documented kind for its name on
the Hub, and a small file for the data set.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
from functools import partial
from pathlib import Path

import datasets
import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvtrie.cli import finetune, generate, longcontext, main
from kvtrie.cli.dotted import arguments, chosen_data, read
from kvtrie.demo.long_prompt import answer
from kvtrie.selective import CacheSettings
from kvtrie.train import (
    DataModule,
    EvalSettings,
    GradientSettings,
    JsonLines,
    LongBenchV2,
    OptimizerSettings,
    Recall,
    Run,
    TrainSettings,
)
from kvtrie.train.lora import LoraSettings

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
COMMANDS = [
    shlex.split(line)[1:]
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("kvtrie ")
]
GROUPS = {
    "kv_cache": CacheSettings,
    "grad": GradientSettings,
    "train": TrainSettings,
    "eval": EvalSettings,
    "lora": LoraSettings,
    "optimizer": OptimizerSettings,
}
PARSERS = {
    **{name: partial(finetune._parser, name) for name in finetune.COMMANDS},
    "longcontext_eval": partial(longcontext._parser, None),
    "generate": generate._parser,
}


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A folder to run commands in, with a model and a data set instead of those of the Hub."""
    monkeypatch.chdir(tmp_path)
    names = ["<unk>", *"ABCD", *(f"w{at}" for at in range(60))]
    tokenizer = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    config = Qwen2Config(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("model")
    Qwen2ForCausalLM(config).save_pretrained("model")
    rows = [
        {
            "context": " ".join(f"w{(at * 7 + word) % 60}" for word in range(60 + 9 * at)),
            "question": "w1 w2",
            "answer": "ABCD"[at % 4],
            **{f"choice_{each}": f"w{at}" for each in "ABCD"},
        }
        for at in range(9)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(rows))

    def fetched(name, split):
        assert (name, split) == ("zai-org/LongBench-v2", "train")
        return datasets.Dataset.from_list(json.loads(Path("cases.json").read_text()))

    monkeypatch.setattr(datasets, "load_dataset", fetched)
    loaders = {
        transformers.AutoTokenizer: PreTrainedTokenizerFast.from_pretrained,
        transformers.AutoModelForCausalLM: transformers.AutoModelForCausalLM.from_pretrained,
    }
    for kind, load in loaders.items():

        def from_local(name, load=load):
            assert name in {"Qwen/Qwen2.5-0.5B", "model"}
            return load("model")

        monkeypatch.setattr(kind, "from_pretrained", from_local)
    return tmp_path


@pytest.mark.usefixtures("local")
def test_the_first_commands_run_as_they_are_written(capsys):
    tuning, evaluation = COMMANDS[:2]
    assert main(tuning) == 0
    assert "Checkpoint, metrics and plot are in OUT." in capsys.readouterr().out
    assert main(evaluation) == 0
    assert "2 cases of validation" in capsys.readouterr().out


def test_the_large_example_runs_as_it_is_written(local, capsys):
    (command,) = [words for words in COMMANDS if "LongBenchV2" in words]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "head model  seq_classification_on_logits" in printed
    assert "cache  h2o-default, 16384 rows" in printed
    assert "step 3/3: loss" in printed or "step 2/2: loss" in printed
    (lengths,) = (local / "OUT" / "data").glob("LongBenchV2-*.json")
    assert len(json.loads(lengths.read_text())["lengths"]) == 9
    for split, cases in (("train", 8), ("validation", 1), ("all", 9)):
        assert main(["longcontext_eval", "OUT", "--split", split]) == 0
        assert f"{cases} cases of {split}" in capsys.readouterr().out
    # A run without a test set is evaluated on what it held back.
    assert main(["longcontext_eval", "OUT"]) == 0
    assert "1 cases of validation" in capsys.readouterr().out
    assert main(["longcontext_eval", "OUT", "--split", "test"]) == 2
    assert "no cases in the split test (train 8, validation 1, test 0)" in capsys.readouterr().err


@pytest.mark.usefixtures("local")
def test_every_split_of_a_run_with_a_test_set_is_evaluated(capsys):
    words = ["finetune_long_lora", "model", "--data", "LongBenchV2", "--data.path", "cases.json"]
    words += ["--data.max_seq_length", "120", "--data.test_set_tag", "rest", "--out_dir", "OUT"]
    words += ["--data.val_split_fraction", "0.4", "--data.seed", "3", "--train.max_steps", "1"]
    words += ["--kv_cache.name", "h2o-default", "--kv_cache.cache_length", "64"]
    assert main(words) == 0
    capsys.readouterr()
    found = {}
    for split in ("train", "validation", "test", "all"):
        assert main(["longcontext_eval", "OUT", "--split", split, "--json"]) == 0
        found[split] = json.loads(capsys.readouterr().out)["cases"]
    assert found["train"] + found["validation"] + found["test"] == found["all"] == 9
    assert min(found.values()) > 0
    assert main(["longcontext_eval", "OUT"]) == 0
    assert f"{found['test']} cases of test" in capsys.readouterr().out


@pytest.mark.usefixtures("local")
def test_a_file_of_keys_takes_those_of_all_data_sets(capsys):
    Path("run.yaml").write_text(
        "data:\n"
        "  class_path: LongBenchV2\n"
        "  init_args: {path: cases.json, max_seq_length: 120, metadata_dir: meta}\n"
        "kv_cache: {name: h2o-default, cache_length: 64, chunk_size: 16}\n"
        "train: {max_steps: 1}\n"
    )
    words = ["finetune_long_lora", "model", "--config", "run.yaml", "--out_dir", "OUT"]
    assert main([*words, "--data.test_set_tag", "rest"]) == 0
    assert Path("meta").is_dir()
    assert main(["longcontext_eval", "OUT", "--split", "test"]) == 0
    assert "cases of test" in capsys.readouterr().out


def accepted(kind):
    """What the constructors of a class and of its bases take by name."""
    found = {}
    for each in kind.__mro__:
        if "__init__" in vars(each) and each is not object:
            given = inspect.signature(each.__init__).parameters.values()
            found |= {one.name: one for one in given if one.kind is one.KEYWORD_ONLY}
    return found


class Mine(Recall):
    """A data set of one's own.

    Args:
        extra: one more.
        **more: as of `Recall`.
    """

    def __init__(self, *, extra: int = 3, **more) -> None:
        super().__init__(**more)
        self.extra = extra


VALUES = {
    "path": "cases.json", "metadata_dir": "meta", "test_set_tag": "rest", "labels": ["a", "b"],
    "prompt_key": "p", "answer_key": "a", "max_seq_length": 120, "trainloader_longest_first": True,
    "val_split_fraction": 0.25, "seed": 5, "cases": 9, "words": 60, "facts": 2, "extra": 7,
}  # fmt: skip


@pytest.mark.parametrize("command", [*finetune.COMMANDS, "longcontext_eval"])
def test_every_argument_of_a_data_set_is_a_key(command):
    parser = PARSERS[command]()
    for kind in (JsonLines, LongBenchV2, Recall, Mine):
        wanted = {name: VALUES[name] for name in accepted(kind)}
        assert set(wanted) >= set(accepted(DataModule))
        words = ["model", "--data", f"{kind.__module__}.{kind.__name__}"]
        for name, value in wanted.items():
            words += [f"--data.{name}", json.dumps(value).strip('"')]
        given = read(parser, words).data
        assert arguments(given.init_args) == wanted
        made = chosen_data(given)
        assert type(made) is kind
        assert made.given == wanted


@pytest.mark.parametrize("command", PARSERS)
def test_keys_are_the_fields_of_settings(command):
    parser = PARSERS[command]()
    keys = {action.dest for action in parser._actions}
    for group, kind in GROUPS.items():
        found = {key.removeprefix(f"{group}.") for key in keys if key.startswith(f"{group}.")}
        wanted = {each.name for each in dataclasses.fields(kind)}
        has = group == "kv_cache" or command in finetune.COMMANDS
        has = has and (group != "lora" or command.endswith("lora"))
        assert found == (wanted if has else set()), group
    if command in finetune.COMMANDS:
        own = {each.name for each in dataclasses.fields(Run)} - {*GROUPS, "mode"}
        assert own <= keys
    if command == "generate":
        taken = {"precision", "device", "max_new_tokens", "yarn_rope", "seed"}
        assert taken <= keys & set(inspect.signature(answer).parameters)


@pytest.mark.parametrize("command", PARSERS)
def test_help_explains_every_key(command):
    parser = PARSERS[command]()
    printed = parser.format_help()
    explained = {
        action.dest: action.help
        for group in parser._action_groups
        for action in group._group_actions
    }
    for group in GROUPS.keys() & {dest.partition(".")[0] for dest in explained}:
        for each in dataclasses.fields(GROUPS[group]):
            assert explained[f"{group}.{each.name}"], f"{group}.{each.name}"
    for kind in (DataModule, JsonLines, LongBenchV2, Recall) if "data" in explained else ():
        for name in accepted(kind):
            assert explained[f"data.{name}"]
            assert f"--data.{name} " in printed
    assert "<class 'kvtrie" not in printed
