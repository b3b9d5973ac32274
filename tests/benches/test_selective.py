"""The evaluation of selective caches runs on a random model, and goes on where it stopped."""

from __future__ import annotations

import json

import torch

from benches.eval_selective import __main__ as evaluate
from benches.eval_selective.beside import Beside
from kvtrie.demo.model import tiny
from kvtrie.selective import CacheSettings, SelectiveCache


def test_an_evaluation_goes_on(tmp_path, capsys, monkeypatch):
    file = tmp_path / "figures.jsonl"
    monkeypatch.setattr(evaluate, "PEER", tmp_path)  # no other program beside
    words = ["--quick", "--json", "--results", str(file)]
    for kind in evaluate.KINDS:  # in processes of their own where both are wanted
        assert evaluate.main([*words, "--kind", kind]) == 0
        capsys.readouterr()
    assert evaluate.main([*words, "--report"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    by_name = {(row["kind"], row["budget"], row["policy"], row["buffers"]): row for row in rows}
    assert ("text", "1/4", "h2o", "default") in by_name
    assert ("facts", "all", "dense", "default") in by_name
    assert any(buffers == "int8" for *_, buffers in by_name)
    lines = file.read_text()
    file.write_text(lines + '{"cut off')
    monkeypatch.setattr(evaluate.Evaluation, "read", None)  # nothing is measured again
    for kind in evaluate.KINDS:
        assert evaluate.main([*words, "--kind", kind]) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == rows


def test_policies_side_by_side_read_what_each_reads_alone():
    model = tiny(layers=2, heads=4).model
    ids = torch.randint(5, 200, (110,), generator=torch.Generator().manual_seed(0)).tolist()
    members = [
        ("h2o-default", {"sinks": 4, "grace_period": 16}),
        ("keydiff-int8", {"sinks": 4}),
        ("lastrec-torch-quantized8", {"sinks": 4}),
        ("mix-snapkv+keydiff-default", {"grace_period": 8}),
        ("h2o-orig-default", {}),
    ]
    with torch.no_grad(), Beside(model, members, 48, 16) as beside:
        beside.logits(ids[:96], keep=1)
        kept = beside.kept()
        first = beside.logits(ids[96:])
        beside.back(kept)
        assert torch.equal(beside.logits(ids[96:]), first)
    for (name, given), mine in zip(members, first, strict=True):
        settings = CacheSettings(name, 48, 16, cache_kwargs=given)
        with torch.no_grad(), SelectiveCache(model, settings) as cache:
            cache.read(torch.tensor([ids[:96]]))
            alone = model(torch.tensor([ids[96:]]), past_key_values=cache).logits[0]
        assert (alone - mine).abs().max() < 1e-4
