"""A turn of a conversation, answered twice: through kvtrie, and without reuse.

The uncached answer is the reference, and the cached answer must have the same tokens. If the
reference's two best logits are closer than `TIE`, rounding of float32 may choose either token, and
the logits are compared instead.
Cost: two generations of the same answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvtrie.engines.transformers import KvtrieCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie import MatchedBlock, Plan
    from kvtrie.demo.model import Speaker
    from kvtrie.transfer import Executor

__all__ = ["AGREE", "TIE", "Turn", "pace", "take"]

TIE = 1e-3
"""Margin between the two best logits below which a choice of token is a tie."""
AGREE = 1e-4
"""Maximum difference of logits between two float32 computations of the same token."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures and the answer of a turn.

    Attributes:
        chat: number of the conversation, from 1.
        turn: number of the turn, from 1.
        prompt: tokens of the prompt.
        reused: tokens reused from each tier, in the tiers' order. A token with a third of its
            layers from a tier counts as a third there.
        holes: dropped tokens within the match, recomputed at their positions.
        sooner: tokens within the match recomputed because loading them would have taken longer.
        earlier: reused tokens left on disk by an earlier run, each counted once, at its first use.
        end: tokens after the match, computed with any cache.
        first_s: seconds to the first token with kvtrie.
        uncached_s: seconds to the first token without kvtrie.
        difference: largest difference of two logits, over the common steps of both answers.
        verdict: "equal", "tie" or "differs".
        answer: the true answer's tokens.
    """

    chat: int
    turn: int
    prompt: int
    reused: tuple[float, ...]
    holes: int
    sooner: int
    earlier: float
    end: int
    first_s: float
    uncached_s: float
    difference: float
    verdict: str
    answer: list[int]


def take(
    speaker: Speaker,
    executor: Executor,
    prompt: Sequence[int],
    *,
    chat: int,
    turn: int,
    answer_tokens: int,
    since: int,
) -> Turn:
    """Answer a prompt with and without kvtrie and compare.

    Args:
        speaker: the model.
        executor: of the manager with the cache.
        prompt: all tokens of the conversation so far.
        chat: number of the conversation and of its session.
        turn: number of the turn.
        answer_tokens: maximum tokens of an answer.
        since: begin of this run, on the executor's clock.

    Raises:
        NoSpaceError: the first tier has no room for the conversation.
    """
    ids = torch.tensor([list(prompt)], device=speaker.model.device)
    tokens, logits, uncached_s = _answer(speaker, ids, None, answer_tokens, time.perf_counter())
    left, dropped = _left(executor, prompt, since)
    started = time.perf_counter()
    with KvtrieCache(
        speaker.model, executor, ids, reserve=answer_tokens, sessions=[f"chat {chat}"]
    ) as cache:
        matched = cache.get_seq_length()
        plan = cache.leases[0].plan
        reused = _reused(plan, cache, len(executor.pools))
        earlier = _earlier(plan, cache, left, executor.manager.block_tokens)
        mine, my_logits, first_s = _answer(speaker, ids, cache, answer_tokens, started)
    executor.drain()
    verdict, difference = _compare(tokens, logits, mine, my_logits)
    return Turn(
        chat=chat,
        turn=turn,
        prompt=len(prompt),
        reused=reused,
        holes=dropped,
        sooner=cache.recovered - dropped,
        earlier=earlier,
        end=len(prompt) - matched,
        first_s=first_s,
        uncached_s=uncached_s,
        difference=difference,
        verdict=verdict,
        answer=tokens,
    )


def _left(executor: Executor, prompt: Sequence[int], since: int) -> tuple[set[int], int]:
    """Return indices of the prompt's resident blocks last used before `since`.

    Also the number of tokens within the match with a layer missing on every tier.
    """
    now = executor.clock()
    match = executor.manager.lookup(prompt, now=now)

    def idle(block: MatchedBlock) -> int:
        tier = block.copies[0].tier
        return executor.manager.explain(block, now=now, tier=tier).idle

    def complete(block: MatchedBlock) -> bool:
        layers = {at for copy in block.copies for at in range(copy.coming_lo, copy.coming_hi)}
        return len(layers) == executor.manager.model.layers

    blocks = enumerate(match.blocks)
    left = {at for at, block in blocks if block.copies and now - idle(block) < since}
    dropped = sum(not complete(block) for block in match.blocks)
    return left, dropped * executor.manager.block_tokens


def pace(speaker: Speaker, tokens: Sequence[int]) -> float:
    """Return the nanoseconds per prefilled token, measured on `tokens` after a warm-up.

    The planner weighs recomputation against loading by this number.
    """
    ids = torch.tensor([list(tokens)], device=speaker.model.device)
    _answer(speaker, ids, None, 1, time.perf_counter())
    _, _, seconds = _answer(speaker, ids, None, 1, time.perf_counter())
    return seconds * 1e9 / len(tokens)


class _FirstToken(StoppingCriteria):
    """Stops nothing, and records the time of the first token."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: object) -> Any:  # noqa: ANN401
        del scores, kwargs
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _answer(
    speaker: Speaker,
    ids: torch.Tensor,
    cache: KvtrieCache | None,
    answer_tokens: int,
    started: float,
) -> tuple[list[int], torch.Tensor, float]:
    """Return greedy tokens, their logits `(steps, vocabulary)`, and seconds to the first token."""
    first = _FirstToken()
    model: Any = speaker.model
    out = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=answer_tokens,
        do_sample=False,
        eos_token_id=speaker.stop,
        return_dict_in_generate=True,
        output_logits=True,
        stopping_criteria=StoppingCriteriaList([first]),
    )
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return tokens, torch.cat(out.logits), (first.at or time.perf_counter()) - started


def _reused(plan: Plan, cache: KvtrieCache, tiers: int) -> tuple[float, ...]:
    """Return the tokens reused from each tier, weighted by the tier's share of layers."""
    sums = [0.0] * tiers
    for span in plan.spans:
        if span.action != "recompute":
            part = (span.layer_hi - span.layer_lo) / len(cache)
            sums[span.tier] += (span.stop - span.start) * part
    return tuple(sums)


def _earlier(plan: Plan, cache: KvtrieCache, left: set[int], block_tokens: int) -> float:
    """Return the reused tokens in these blocks, weighted as in `_reused`."""
    tokens = 0.0
    for span in plan.spans:
        if span.action != "recompute":
            part = (span.layer_hi - span.layer_lo) / len(cache)
            within = sum(at // block_tokens in left for at in range(span.start, span.stop))
            tokens += within * part
    return tokens


def _compare(
    tokens: list[int], logits: torch.Tensor, mine: list[int], my_logits: torch.Tensor
) -> tuple[str, float]:
    shared = next(
        (at for at, (a, b) in enumerate(zip(tokens, mine, strict=False)) if a != b),
        min(len(tokens), len(mine)),
    )
    steps = min(shared + 1, len(logits), len(my_logits))
    difference = float((logits[:steps] - my_logits[:steps]).abs().max())
    if tokens == mine:
        return "equal", difference
    if shared == steps:  # one answer is the beginning of the other
        return "differs", difference
    best, second = logits[shared].topk(2).values
    tie = float(best - second) < TIE and difference < AGREE
    return ("tie" if tie else "differs"), difference
