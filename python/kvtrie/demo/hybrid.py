"""`kvtrie demo --hybrid`: models with different kinds of layers, each through three tiers twice.

For every family five chats with a common system prompt take two turns. The tiers are closed and
opened again with the blocks on disk, and the chats take the same turns once more. Every answer is
compared with the model's own. The exit status is the verdict: 0 if all answers are the same.
Invariant: gpu and host memory are too small for the chats, so resume points move to disk and back.
Cost: a minute of one core, and 10 MB of a temporary folder.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie import BlockManager, Cost, ModelShape, ResumePoints, Tier
from kvtrie.demo.families import FAMILIES, VOCABULARY, family
from kvtrie.engines.transformers import KvtrieCache, fingerprint, model_shape
from kvtrie.engines.transformers.open_model import close_executor
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from transformers import PreTrainedModel

__all__ = ["FamilyRun", "hybrid_demo", "run_family"]

_BLOCK = 8
_CHATS, _TURNS, _ROUNDS = 5, 2, 2
_STEPS = 4
_GPU_BLOCKS, _HOST_BLOCKS = 14, 16
_DISK = "10MB"
_TIE = 1e-3  # margin of two logits too small for fp32
_NOTHING = 2**32 - 1


@dataclass(slots=True)
class FamilyRun:
    """Figures of a family.

    Attributes:
        name: the family.
        groups: its groups of layers, as text.
        answers: compared answers.
        different: answers with different tokens, without ties.
        tokens: prompt tokens of all turns.
        found: prompt tokens found on a tier.
        loaded: blocks and states loaded from host memory.
        from_disk: blocks and states loaded from disk.
        restored: blocks of the first group on disk after the restart.
        held: bytes of memory held by resume points on all tiers.
        all_layers: bytes of memory for the same blocks with all layers of every group.
        map: per group, a letter per block of the longest chat: g gpu, h host, d disk, "." nowhere.
    """

    name: str
    groups: list[str]
    answers: int = 0
    different: int = 0
    tokens: int = 0
    found: int = 0
    loaded: int = 0
    from_disk: int = 0
    restored: int = 0
    held: int = 0
    all_layers: int = 0
    map: list[str] = field(default_factory=list[str])


def hybrid_demo(*, as_json: bool) -> int:
    """Run every family and print its figures.

    Args:
        as_json: print a JSON document instead of readable lines.

    Returns:
        0 if every answer was the model's own, else 1.
    """
    runs: list[FamilyRun] = []
    for name in FAMILIES:
        runs.append(run_family(name))
        if not as_json:
            sys.stdout.write(_lines(runs[-1]))
            sys.stdout.flush()
    if as_json:
        sys.stdout.write(json.dumps([asdict(run) for run in runs]) + "\n")
    wrong = sum(run.different for run in runs)
    if not as_json:
        verdict = "every answer is the model's own" if not wrong else f"{wrong} answers differ"
        sys.stdout.write(f"{len(runs)} families, {sum(run.answers for run in runs)} answers: ")
        sys.stdout.write(verdict + "\n")
    return 1 if wrong else 0


def run_family(name: str) -> FamilyRun:
    """Serve the chats of a family.

    Args:
        name: a name in `FAMILIES`.

    Raises:
        ConfigError: an unknown name.
    """
    model = family(name)
    shape = model_shape(model, fingerprint=fingerprint(model))
    run = FamilyRun(name, [group.identity() for group in shape.groups] or ["full"])
    with TemporaryDirectory() as folder:
        for _ in range(_ROUNDS):
            with _executor(shape, folder) as executor:
                run.restored = executor.restore()
                chats = _round(model, executor, run)
                executor.save()
                executor.manager.audit()
                _count(executor, shape, run, max(chats, key=lambda chat: chat.shape[1]))
    return run


@contextmanager
def _executor(shape: ModelShape, folder: str) -> Generator[Executor]:
    """Open three tiers, the first two with room for a part of the chats."""
    resume = ResumePoints() if shape.groups else None
    sizes = [shape.block_bytes(_BLOCK, group) for group in range(max(1, len(shape.groups)))]
    # A resume point has a state or two blocks of a window.
    point = sum(
        size * (1 if group.state_bytes else 2)
        for size, group in zip(sizes[1:], shape.groups[1:], strict=True)
    )
    # A path keeps the states at its branch and its end, and a row writes two more.
    points = 14 if any(group.state_bytes for group in shape.groups) else 5
    tiers = [
        Tier("gpu", bytes=_GPU_BLOCKS * sizes[0] + points * point),
        Tier("host", bytes=_HOST_BLOCKS * sizes[0] + points * point),
        Tier("disk", bytes=_DISK, path=folder),
    ]
    manager = BlockManager(
        shape,
        tiers,
        block_tokens=_BLOCK,
        cost=Cost(ns_per_token=1e9),  # makes loads cheaper than computing for a tiny model
        resume=resume,
    )
    executor = Executor(manager, open_pools(shape, tiers, _BLOCK, resume=resume))
    try:
        yield executor
    finally:
        close_executor(executor)


def _round(model: PreTrainedModel, executor: Executor, run: FamilyRun) -> list[torch.Tensor]:
    """Take all turns of all chats, the same in every round."""
    generator = torch.Generator().manual_seed(0)

    def some(tokens: int) -> torch.Tensor:
        drawn = torch.randint(1, VOCABULARY, (1, tokens), generator=generator)
        return drawn.to(model.device)

    chats = [some(3 * _BLOCK + 5)] * _CHATS
    for turn in range(_TURNS):
        for at in range(_CHATS):
            ids = torch.cat([chats[at], some(7 + 3 * at + turn)], dim=1)
            chats[at] = _turn(model, executor, ids, run)
    return chats


def _turn(
    model: PreTrainedModel, executor: Executor, ids: torch.Tensor, run: FamilyRun
) -> torch.Tensor:
    truth = _answer(model, ids, None)
    with KvtrieCache(model, executor, ids, reserve=_STEPS) as cache:
        run.found += cache.leases[0].matched
        mine = _answer(model, ids, cache)
    run.tokens += ids.shape[1]
    run.answers += 1
    wrong = (truth.sequences != mine.sequences)[0].nonzero().flatten().tolist()
    if wrong:
        best, second = truth.logits[wrong[0] - ids.shape[1]][0].topk(2).values.tolist()
        run.different += best - second > _TIE
    return truth.sequences


def _answer(model: PreTrainedModel, ids: torch.Tensor, cache: KvtrieCache | None) -> Any:  # noqa: ANN401 - transformers' output
    return cast("Any", model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=_STEPS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def _count(executor: Executor, shape: ModelShape, run: FamilyRun, chat: torch.Tensor) -> None:
    """Count the contents of the tiers, and draw the residency of a chat."""
    manager = executor.manager
    stats = manager.stats().tiers
    run.loaded += stats["host"].promoted
    run.from_disk += stats["disk"].promoted
    run.held = run.all_layers = 0
    for tier in stats.values():
        groups = [group.held for group in tier.groups] or [tier.slots - tier.free]
        sizes = [shape.block_bytes(_BLOCK, group) for group in range(len(groups))]
        run.held += sum(held * size for held, size in zip(groups, sizes, strict=True))
        run.all_layers += groups[0] * sum(sizes)
    tokens = chat[0].cpu().numpy()
    with manager.acquire(tokens, now=executor.clock(), load="none") as lease:
        tables = [
            [lease.slots(tier, group).tolist() for tier in range(len(stats))]
            for group in range(max(1, len(shape.groups)))
        ]
        run.map = [_row(each, len(tokens) // _BLOCK) for each in tables]


def _row(tables: Sequence[Sequence[int]], blocks: int) -> str:
    """Return the fastest tier of each block in a group."""
    row = ""
    for block in range(blocks):
        matching = [
            letter
            for letter, table in zip("ghd", tables, strict=True)
            if block < len(table) and table[block] != _NOTHING
        ]
        row += matching[0] if matching else "."
    return row


def _lines(run: FamilyRun) -> str:
    share = run.found / max(1, run.tokens)
    head = (
        f"{run.name}: {run.answers - run.different} of {run.answers} answers equal, "
        f"{share:.0%} of {run.tokens} tokens found, {run.loaded} blocks loaded from host, "
        f"{run.from_disk} from disk, {run.held / 1e3:.0f} kB held, all layers "
        f"{run.all_layers / 1e3:.0f} kB\n"
    )
    width = max(map(len, run.groups))
    rows = zip(run.groups, run.map, strict=True)
    return head + "".join(f"  {group:<{width}}  {row}\n" for group, row in rows)
