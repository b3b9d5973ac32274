"""Chats: a few conversations that need all that the engine can do, and the verdict on them.

They begin with the same system prompt, come at different steps, and come back. The gpu tier holds
two or three of them, the host tier nearly all.
Invariant: the verdict is good only if every answer is what the unsharded model generates by itself
and all of `_PROMISED` has been seen.
Cost: two processes that import torch; then milliseconds per step.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch and transformers leave methods untyped)

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.paged_engine.model import shard
from examples.paged_engine.ranks import Ranks
from examples.paged_engine.scheduler import ChatRequest
from examples.paged_engine.worker import Setup
from kvtrie import BlockManager, Cost, ModelShape, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from examples.paged_engine.scheduler import Scheduler, StepReport

_VOCABULARY = 211
_BLOCK_TOKENS = 8
_SYSTEM = 24  # tokens of the system prompt
_PROMISED = (
    "batch",
    "mixed batch",
    "from gpu",
    "from host",
    "loaded",
    "stored",
    "failed load",
    "preempted",
    "resumed",
)


class ChatTurn(NamedTuple):
    """A message of `words` tokens. It comes at `step`, or when the turn it follows is answered."""

    name: str
    step: int
    words: int
    answer: int
    follows: str = ""


_TURNS = (
    ChatTurn("ann", 0, 13, 12),
    ChatTurn("bob", 2, 20, 30),
    ChatTurn("cid", 3, 30, 16),
    ChatTurn("ann again", 16, 9, 10, "ann"),
    ChatTurn("cid again", 20, 15, 10, "cid"),
    ChatTurn("dot", 22, 26, 8),
    ChatTurn("bob again", 30, 11, 8, "bob"),
)


def tiny_llama() -> Any:  # noqa: ANN401 - LlamaForCausalLM, whose methods are untyped
    """A random model, its weights drawn wide, so that logits depend on every key."""
    torch.set_num_threads(1)  # so small a model only loses by sharing its work out
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


def start(
    model: Any,  # noqa: ANN401
    gpu: int,
    host: int,
    fail_on: int,
    *,
    events: bool = False,
) -> tuple[BlockManager, Ranks]:
    """A manager whose gpu tier is the engine's, and two ranks with the memory of its tiers.

    The first load fails on rank `fail_on`. With `events` the manager keeps those of its blocks for
    a publisher.
    """
    shape = ModelShape.from_config(model.config, tp=2)
    manager = BlockManager(
        shape,
        [Tier("gpu", blocks=gpu, owner="engine"), Tier("host", blocks=host)],
        block_tokens=_BLOCK_TOKENS,
        structure="holes",
        cost=Cost(ns_per_token=200_000),  # compute time that plans compare with loads
        ranks=2,
        events=10_000 if events else 0,
        events_of="residency",
    )
    config = model.config.to_dict()
    setups = [
        Setup(shape, config, shard(model, rank, 2), [gpu, host], _BLOCK_TOKENS, rank == fail_on)
        for rank in range(2)
    ]
    return manager, Ranks(setups)


def serve(
    scheduler: Scheduler, look: Callable[[int, StepReport], None]
) -> tuple[dict[str, list[int]], list[StepReport]]:
    """Every turn to its end; `look` sees each step. The tokens of every turn, and the reports."""
    random = np.random.default_rng(0)
    new_tokens = {one.name: random.integers(1, _VOCABULARY, one.words).tolist() for one in _TURNS}
    answered = {"": random.integers(1, _VOCABULARY, _SYSTEM).tolist()}
    coming = list(_TURNS)
    requests: dict[str, ChatRequest] = {}
    reports: list[StepReport] = []
    while coming or not scheduler.idle:
        for turn in [one for one in coming if one.step <= len(reports) and one.follows in answered]:
            prompt = answered[turn.follows] + new_tokens[turn.name]
            requests[turn.name] = ChatRequest(turn.name, prompt, len(prompt) + turn.answer)
            scheduler.submit(requests[turn.name])
            coming.remove(turn)
        report = scheduler.step()
        look(len(reports), report)
        reports.append(report)
        for event in report.events:
            if event.what == "done":
                answered[event.who] = requests[event.who].tokens
    return answered, reports


def judge(model: Any, answered: dict[str, list[int]], reports: list[StepReport]) -> dict[str, Any]:  # noqa: ANN401
    """Return errors, missing events, and the events seen, in tokens, blocks or steps.

    `margin` is the least distance between the best two logits of a step: far above the rounding
    that another order of additions costs, or the comparison would be a matter of luck.
    """
    wrong: list[str] = []
    margins: list[float] = []
    for turn in _TURNS:
        tokens = answered[turn.name]
        prompt = torch.tensor([tokens[: -turn.answer]])
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=turn.answer,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        if generated.sequences[0].tolist() != tokens:
            wrong.append(turn.name)
        best = torch.cat(generated.logits).topk(2).values
        margins.append(float((best[:, 0] - best[:, 1]).min()))
    seen: Counter[str] = Counter()
    for report in reports:
        sizes = set(report.computed.values())
        seen["batch"] += len(report.computed) > 1
        seen["mixed batch"] += 1 in sizes and len(sizes) > 1  # a decode and a prefill
        for event in report.events:
            seen[event.what] += event.amount
    missing = [what for what in _PROMISED if not seen[what]]
    return {
        "ok": not wrong and not missing,
        "wrong": wrong,
        "missing": missing,
        "margin": min(margins),
        "seen": seen,
    }
