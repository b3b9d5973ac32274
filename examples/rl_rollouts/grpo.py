"""Group relative policy optimisation of a tiny Llama; its KV goes through kvtrie.

Each update samples a group of answers per prompt, rewards each answer by its share of even tokens,
and follows the advantage of each answer over its group. The prompts share instructions, so one pass
over a prompt computes its question alone; the group's answers start from the blocks of that pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtrie.engines.transformers import open as open_kv

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtrie.engines.transformers import OpenModel

__all__ = ["Figures", "Settings", "train"]

_VOCABULARY = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run, in tokens where nothing else is said.

    Attributes:
        updates: updates of the weights.
        prompts: prompts per update; the same ones each time.
        group: answers per prompt.
        instructions: tokens that all prompts begin with.
        question: further tokens of each prompt.
        answer: tokens of each answer.
    """

    updates: int = 4
    prompts: int = 4
    group: int = 8
    instructions: int = 64
    question: int = 12
    answer: int = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """What one update has cost and gained.

    Attributes:
        update: its number.
        reward: mean share of even tokens in the answers, before the update.
        prompt_tokens: tokens of the prompts of all answers.
        computed: those that were computed.
        stale: tokens found before anything was computed with these weights.
        differ: tokens of answers that differ from those without a cache.
    """

    update: int
    reward: float
    prompt_tokens: int
    computed: int
    stale: int
    differ: int

    def __str__(self) -> str:
        return (
            f"update {self.update}: reward {self.reward:.3f}, {self.computed} of "
            f"{self.prompt_tokens} prompt tokens computed, {self.stale} stale, {self.differ} differ"
        )


def train(settings: Settings, folder: str) -> Iterator[Figures]:
    """Train a model; yield the figures of each update.

    Args:
        settings: sizes of the run.
        folder: of a disk tier, in which the KV of all weights so far is.
    """
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] - torch's
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    shared = torch.randint(0, _VOCABULARY, (settings.instructions,))
    prompts = [
        torch.cat((shared, torch.randint(0, _VOCABULARY, (settings.question,))))
        for _ in range(settings.prompts)
    ]
    for update in range(settings.updates):
        model.eval()
        # The name of the weights is part of that of the KV: another one after each update.
        with (
            open_kv(model, host="8MB", disk=f"{folder}:64MB", gpu="8MB", block_tokens=8) as kv,
            torch.no_grad(),
        ):
            groups, figures = _roll_out(kv, prompts, settings, update)
        yield figures
        optimizer.zero_grad()
        for answers in groups:
            _loss(model, answers, settings).backward()  # pyright: ignore[reportUnknownMemberType] - torch's
        optimizer.step()  # pyright: ignore[reportUnknownMemberType] - torch's


def _model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,  # wide, so that logits depend on every key
        dtype="float32",
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def _roll_out(
    kv: OpenModel, prompts: list[torch.Tensor], settings: Settings, update: int
) -> tuple[list[torch.Tensor], Figures]:
    """Sample a group of answers per prompt: int64 `(group, tokens)` each."""
    groups: list[torch.Tensor] = []
    asked = computed = differ = stale = 0
    for prompt in prompts:
        with kv.cache(prompt[None]) as cache:
            found = cache.get_seq_length()
            # Before the first pass with these weights nothing may be found.
            stale += 0 if groups else found
            computed += len(prompt) - found + cache.recovered
            kv.model(prompt[None, found:], past_key_values=cache)
        rows = prompt.repeat(settings.group, 1)
        seed = 1000 * update + len(groups)
        with kv.cache(rows, reserve=settings.answer) as cache:
            computed += (len(prompt) - cache.get_seq_length()) * settings.group + cache.recovered
            answers = _sample(kv, rows, settings, seed, past_key_values=cache)
        differ += int((answers != _sample(kv, rows, settings, seed)).sum())
        asked += rows.numel()
        groups.append(answers)
    reward = torch.stack([_reward(each, settings) for each in groups]).mean().item()
    return groups, Figures(update, reward, asked, computed, stale, differ)


def _sample(
    kv: OpenModel, rows: torch.Tensor, settings: Settings, seed: int, **cache: object
) -> torch.Tensor:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] - torch's
    generate: Any = kv.model.generate  # whose types transformers leaves open
    return generate(rows, max_new_tokens=settings.answer, do_sample=True, **cache)


def _reward(answers: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The share of even tokens of each answer."""
    return (answers[:, -settings.answer :] % 2 == 0).float().mean(1)


def _loss(model: LlamaForCausalLM, answers: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The policy gradient with the advantage of each answer over its group."""
    reward = _reward(answers, settings)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    logits = model(answers[:, :-1]).logits[:, -settings.answer :]
    chosen = answers[:, -settings.answer :, None]
    logs = logits.log_softmax(-1).gather(-1, chosen)[..., 0]
    return -(advantage[:, None] * logs).mean()
