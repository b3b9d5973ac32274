"""Data: splits, lengths that are found again, and batches."""

from __future__ import annotations

import json

import pytest
import torch

from kvtrie.errors import ConfigError
from kvtrie.train import IGNORED, JsonLines, LongBenchV2, Recall
from kvtrie.train.data import Case, collate, epoch


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
    assert len(counted) == 24
    again = Recall(**given, max_seq_length=85)
    again.prepare(tokens, name="m")
    assert len(counted) == 24  # whatever max_seq_length is
    other = Recall(**given)
    other.prepare(tokens, name="another model")
    assert len(counted) == 48
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
    lines = [{"prompt": "a b", "answer": "c"}, {"text": "d e f"}, {"prompt": "g", "label": "no"}]
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
    for wrong in ("{", '{"answer": "x"}', '{"prompt": "g", "label": 7}', '{"prompt": 3}'):
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
