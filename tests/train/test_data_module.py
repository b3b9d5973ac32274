"""Data: splits, lengths that are found again, and batches."""

from __future__ import annotations

import inspect
import json
from pydoc import locate

import pytest
import torch
from masked import make
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from tuning import run

from kvtrie.demo.model import from_name
from kvtrie.errors import ConfigError
from kvtrie.train import (
    IGNORED,
    DataModule,
    JsonLines,
    LongBenchV2,
    Recall,
    finetune,
    make_head,
)
from kvtrie.train.data import Case, Example, collate, epoch
from kvtrie.train.saved import Saved


def words(text):
    return [1 + sum(map(ord, word)) % 96 for word in text.split()]


def test_recall_is_the_same_and_holds_its_answer():
    one, two = (Recall(cases=20, words=80, seed=3).examples() for _ in range(2))
    assert one == two
    assert one != Recall(cases=20, words=80, seed=4).examples()
    for each in one:
        name = each.prompt.split("box of ")[1].split("?")[0]
        assert f"{name} has a box that is{each.answer}." in each.prompt
        assert Recall.labels[each.label] == each.answer
        assert each.prompt.endswith("Answer:")
        assert 80 <= len(each.prompt.split()) <= 92
    assert len({each.answer for each in one}) > 3
    with pytest.raises(ConfigError, match="words is 20"):
        Recall(words=20)


def test_splits_take_each_case_once_and_rest_is_sorted():
    data = Recall(cases=40, words=80, max_seq_length=86, test_set_tag="rest")
    data.prepare(words)
    parts = [data.train, data.validation, data.test]
    assert sorted(at for part in parts for at in part.places) == list(range(40))
    kept = len(data.train.places) + len(data.validation.places)
    assert len(data.validation.places) == kept // 10
    assert max(data.train.lengths + data.validation.lengths) <= 86
    assert list(data.test.lengths) == sorted(data.test.lengths)
    assert min(data.test.lengths) > 86
    for part in parts:
        assert [len(data.case(at).input_ids) for at in part.places] == list(part.lengths)


def test_lengths_are_found_again(tmp_path):
    counted = []

    def tokens(text):
        counted.append(text)
        return words(text)

    given = {"cases": 12, "words": 80, "metadata_dir": str(tmp_path / "meta")}
    first = Recall(**given)
    first.prepare(tokens, name="m")
    assert len(counted) == 36
    again = Recall(**given, max_seq_length=85)
    again.prepare(tokens, name="m")
    assert len(counted) == 36  # whatever max_seq_length is
    other = Recall(**given)
    other.prepare(tokens, name="another model")
    assert len(counted) == 72
    for path in (tmp_path / "meta").iterdir():
        path.write_text("{")
    first.prepare(tokens, name="m")
    assert first.train.lengths


def test_targets_are_the_answer_or_the_class():
    data = Recall(cases=4, words=80)
    data.prepare(words)
    case, example = data.case(0), data.example(0)
    assert case.input_ids == words(example.prompt)
    assert case.targets == words(example.answer)
    data = Recall(cases=4, words=80)
    data.prepare(words, classes=True)
    assert data.case(0).targets == [example.label]


def test_batches_are_padded_on_the_left():
    batch = collate([Case([1, 2, 3], [9]), Case([4], [8, 7])], pad=5)
    assert batch.input_ids.tolist() == [[1, 2, 3], [5, 5, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.targets.tolist() == [[IGNORED, 9], [8, 7]]
    assert batch.tokens == 4
    assert collate([Case([1, 2], [9]), Case([3, 4], [8])]).attention_mask is None
    assert batch.to(torch.device("cpu")).tokens == 4


def test_an_epoch_is_shuffled_and_may_begin_with_the_longest():
    lengths = [5, 9, 1, 8, 7, 3]
    assert epoch(lengths, 2, seed=1, number=0) == epoch(lengths, 2, seed=1, number=0)
    assert epoch(lengths, 2, seed=1, number=0) != epoch(lengths, 2, seed=1, number=1)
    first = epoch(lengths, 2, seed=1, number=0, longest_first=True)
    assert set(first[0]) == {1, 3}
    assert sorted(at for batch in first for at in batch) == list(range(6))
    assert len(epoch(lengths, 4, seed=1, number=0)) == 1
    assert len(epoch([3], 4, seed=0, number=0)[0]) == 4


def test_json_lines_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": "a b", "answer": "c"}, {"text": "d e f"}, {"prompt": "g h", "label": "no"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    data = JsonLines(path=str(path), labels=["yes", "no"], val_split_fraction=0.0)
    data.prepare(words)
    assert len(data.train.places) == 3
    assert data.case(0).targets == words("c")
    assert data.case(1).input_ids == words("d e")
    assert data.case(1).targets == words("e f")
    assert data.example(2).label == 1
    with pytest.raises(ConfigError, match="without a class"):
        data.prepare(words, classes=True)
    wrongs = ["{", '{"answer": "x"}', '{"prompt": "g", "label": 7}', '{"prompt": 3}', "[1]"]
    wrongs += ['{"prompt": "a"}', '{"prompt": "a", "label": 0.5}', '{"prompt": "a", "label": true}']
    wrongs += ['{"prompt": "a\\ud800", "answer": "b"}', '{"prompt": "a", "answer": null}']
    wrongs += ['{"messages": []}', '{"messages": [{"role": "user", "content": "a"}]}']
    for wrong in wrongs:
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="line 1"):
            JsonLines(path=str(path), labels=["yes"]).prepare(words)
    with pytest.raises(ConfigError, match="cannot read"):
        JsonLines(path=str(tmp_path / "none")).prepare(words)


def test_longbench_reads_a_file(tmp_path):
    path = tmp_path / "cases.json"
    choices = {f"choice_{name}": f"it is {name}" for name in "ABCD"}
    case = {"context": "Long ago.", "question": "What is it?", **choices, "answer": "C"}
    path.write_text(json.dumps([case, {**case, "answer": "A"}]))
    found = LongBenchV2(path=str(path)).examples()
    assert [each.label for each in found] == [2, 0]
    assert found[0].answer == " C"
    assert found[0].prompt.startswith("Long ago.\n\nQuestion: What is it?\n(A) it is A\n")
    for wrong in ("{}", "[", "[{}]", json.dumps([{**case, "answer": "E"}])):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            LongBenchV2(path=str(path)).examples()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_seq_length": 5}, "all 8 cases are longer than max_seq_length 5"),
        ({"val_split_fraction": 1.0}, "val_split_fraction is 1.0"),
        ({"test_set_tag": "best"}, "test_set_tag is one of"),
        ({"test_set_tag": "rest"}, "needs a max_seq_length"),
    ],
)
def test_data_that_cannot_be(given, said):
    with pytest.raises(ConfigError, match=said):
        Recall(cases=8, words=80, **given).prepare(words)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\r"])
def test_only_a_newline_ends_a_line(tmp_path, separator):
    path = tmp_path / "data.jsonl"
    row = json.dumps({"prompt": f"a{separator}b", "answer": "c"}, ensure_ascii=False)
    path.write_bytes(f"\ufeff{row}\r\n\n{row}".encode())
    data = JsonLines(path=str(path), val_split_fraction=0.0)
    data.prepare(words)
    assert [data.example(at).prompt for at in range(2)] == [f"a{separator}b"] * 2
    assert data.where(1) == f"{path}, line 3"


def test_a_missing_field_is_named_with_what_would_do(tmp_path):
    path = tmp_path / "data.jsonl"
    good = json.dumps({"prompt": "a", "answer": "b"})
    path.write_text(good + "\n" + json.dumps({"instruction": "say hi", "output": "hi"}))
    with pytest.raises(ConfigError, match="line 2: no prompt and no answer among 'instruction'"):
        JsonLines(path=str(path)).examples()
    path.write_text(json.dumps({"instruction": "say hi", "output": "hi"}))
    (found,) = JsonLines(path=str(path), prompt_key="instruction", answer_key="output").examples()
    assert (found.prompt, found.answer) == ("say hi", "hi")


def test_cases_without_a_target_are_counted_and_left_out(tmp_path, caplog):
    path = tmp_path / "data.jsonl"
    rows = [("a b", "c"), ("", "x"), ("q", ""), ("d", "e f"), (" ", " ")]
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in rows))
    for more in ({}, {"metadata_dir": str(tmp_path)}, {"metadata_dir": str(tmp_path)}):
        caplog.clear()
        data = JsonLines(path=str(path), val_split_fraction=0.0, **more)
        data.prepare(words)
        assert sorted(data.train.places) == [0, 3]
        assert (
            f"3 of 5 cases have no target, or no token before it; the first is {path}, line 2"
            in (caplog.text)
        )
    path.write_text(json.dumps({"prompt": "q", "answer": ""}))
    with pytest.raises(ConfigError, match=r"1 of 1 cases have no target.*line 1"):
        JsonLines(path=str(path)).prepare(words)


@pytest.mark.parametrize("added", ["", "bos", "bos eos"])
def test_what_is_trained_is_the_prompt_and_the_answer(tmp_path, added):
    """Whatever special tokens a tokenizer adds, none comes between the two."""
    names = ["[UNK]", "<s>", "</s>", *"abcde", "<user>", "<assistant>"]
    inner = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, "[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    if added:
        single = "<s> $A" + (" </s>" if "eos" in added else "")
        special = [("<s>", 1), ("</s>", 2)]
        inner.post_processor = TemplateProcessing(single=single, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    make(vocab_size=len(names)).save_pretrained(tmp_path)
    speaker = from_name(str(tmp_path))
    path = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    rows = [{"prompt": "a b", "answer": "c d"}, {"messages": messages}]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = JsonLines(path=str(path), val_split_fraction=0.0)
    data.prepare(speaker.tokens, continued=speaker.continued, chat=speaker.chat)
    case, chat = data.case(0), data.case(1)
    assert case.input_ids + case.targets[-1:] == [*tokenizer("a b").input_ids, 5, 6]
    assert case.targets == [5, 6]
    assert chat.input_ids + chat.targets[-1:] == [8, 3, 4, 2, 9, 5, 6, 2]
    assert chat.targets == [5, 6, 2]
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="line 2: messages take a tokenizer with a chat template"):
        data.prepare(speaker.tokens, continued=speaker.continued)
    with pytest.raises(ConfigError, match="without a class, the first is"):
        data.prepare(speaker.tokens, classes=True)


def marking(prefix):
    """A tokenizer that marks the beginning of a word, as those of Llama 2 and Mistral do."""
    words = [*"ABCD:", "red", "blue", "is", "of", "the", "The", "letter", "answer"]
    pieces = ["<unk>", "<s>", "▁", *words, *(f"▁{word}" for word in words)]
    tokenizer = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    if prefix == "always":
        tokenizer.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer, pieces.index


@pytest.mark.parametrize("prefix", ["always", "first"])
def test_labels_and_answers_have_the_tokens_that_follow_the_prompt(tmp_path, prefix):
    tokenizer, place = marking(prefix)
    given = dict.fromkeys(("context", "question", *(f"choice_{each}" for each in "ABCD")), "the")
    (tmp_path / "cases.json").write_text(json.dumps([given | {"answer": each} for each in "ABCD"]))
    (tmp_path / "lines").write_text(
        json.dumps({"prompt": "the letter is:", "answer": " red blue"})
        + "\n"
        + json.dumps({"prompt": "the letter is: ", "answer": "red"})
    )

    def tokens(text, *, special=True):
        return tokenizer.encode(text, add_special_tokens=special).ids

    def continued(text):
        return tokens(text, special=False)

    if prefix == "always":
        assert continued(" A") == [place("▁"), place("▁A")]  # alone, a label has one mark too many
    data = LongBenchV2(path=str(tmp_path / "cases.json"))
    data.prepare(tokens, continued=continued, classes=True)
    assert data.label_tokens() == [[place(f"▁{each}")] for each in "ABCD"]
    head = make_head("seq_classification_on_logits", make(), data.label_tokens())
    assert head.labels.tolist() == [place(f"▁{each}") for each in "ABCD"]
    lines = JsonLines(path=str(tmp_path / "lines"), val_split_fraction=0)
    lines.prepare(tokens, continued=continued)
    case = lines.case(0)
    assert case.targets == [place("▁red"), place("▁blue")]
    assert case.input_ids + case.targets[-1:] == tokens("the letter is: red blue")
    # A token would span the border: the answer has the tokens that it has alone.
    assert lines.case(1).targets == continued("red")


def test_classification_of_labels_that_follow_a_mark_runs(tmp_path):
    tokenizer, place = marking("always")
    found = finetune(
        make(),
        Classes(),
        run(tmp_path, head_model="seq_classification_on_logits"),
        tokens=lambda text: tokenizer.encode(text).ids,
        continued=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    )
    assert found.steps == 3
    about = Saved(tmp_path).about()
    assert about.labels == [[place("▁red")], [place("▁blue")]]
    assert about.data["class_path"] == f"{__name__}.Classes"
    assert locate(about.data["class_path"]) is Classes


class Classes(DataModule):
    """Two classes whose names follow a prompt."""

    labels = (" red", " blue")

    def examples(self):
        return [Example("the answer " * (12 + at) + "is:", label=at % 2) for at in range(8)]


def test_arguments_are_noted_by_name():
    class Mine(Recall):
        def __init__(self, extra, *, more=1, **others):
            super().__init__(**others)
            self.own = extra, more

    assert Recall(cases=3, seed=4).given == {"cases": 3, "seed": 4}
    assert Mine(5, words=90).given == {"extra": 5, "words": 90}
    assert inspect.signature(Recall).parameters.keys() >= {"cases", "words", "facts"}
    assert "max_seq_length" in inspect.signature(DataModule).parameters
