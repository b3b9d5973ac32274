"""The demo's run: twelve interleaved conversations in too little memory, turn by turn.

Every turn is answered with kvtrie and without reuse, and compared. The exit status is the verdict:
0 if every answer is the same and, with structure "holes", tokens were recomputed in holes. 1 if
not, 2 if the demo cannot start, 130 after Ctrl-C.
Cost: about two minutes of two CPU cores with SmolLM2, seconds with the tiny model.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from kvtrie import BlockManager, Cost, Lane, ModelShape, Tier
from kvtrie.demo.chats import CHATS, SYSTEM
from kvtrie.demo.gain import gain_table, gains
from kvtrie.demo.model import Speaker, cache_folder, smollm, tiny
from kvtrie.demo.picture import draw
from kvtrie.demo.report import capture, write_report
from kvtrie.demo.residency import grid, share
from kvtrie.demo.turn import AGREE, TIE, Turn, pace, take
from kvtrie.demo.turn_table import print_turns
from kvtrie.engines.transformers import fingerprint
from kvtrie.errors import KvtrieError
from kvtrie.tiers import default_device, open_pools
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Options", "demo"]

_TURNS = 3
_BLOCK_TOKENS = 16
_PLAIN_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `kvtrie demo`.

    Attributes:
        structure: "holes" (with single layers as victims) or "leaf-only" (whole blocks).
        tiny: a random model instead of SmolLM2.
        picture: path for the picture, or None.
        save: path for a report for `kvtrie map` and `kvtrie stats`, or None.
        json: print a JSON document instead of readable lines.
        answer_tokens: maximum tokens of an answer.
        gpu_share: blocks of the `gpu` tier per block of all KV.
        host_share: blocks of the `host` tier per block of all KV.
        disk_share: blocks of the `disk` tier per block of all KV.
        disk: folder of the `disk` tier, for later runs to find its blocks. None for no disk tier.
        seed: seed of the order of the conversations' turns.
    """

    structure: Literal["holes", "leaf-only"] = "holes"
    tiny: bool = False
    picture: Path | None = Path("kvtrie-demo.png")
    save: Path | None = None
    json: bool = False
    answer_tokens: int = 12
    gpu_share: float = 1 / 8
    host_share: float = 1 / 4
    disk_share: float = 1 / 4
    disk: Path | None = field(default_factory=lambda: cache_folder() / "demo-disk")
    seed: int = 1


@dataclass(slots=True)
class _Record:
    """Recorded turns and residency of the run."""

    turns: list[Turn] = field(default_factory=list[Turn])
    shares: list[list[float]] = field(default_factory=list[list[float]])


def demo(options: Options) -> int:
    """Run the demo, print its results and return its exit status."""
    console = Console(
        stderr=options.json,
        highlight=False,
        soft_wrap=True,
        width=None if sys.stdout.isatty() else _PLAIN_WIDTH,
    )
    try:
        if options.tiny:
            torch.set_num_threads(1)  # threads slow down so small a model
        speaker = tiny() if options.tiny else smollm(console)
        torch.nn.Module.to(speaker.model, default_device())  # the device of the first tier
        return _run(options, speaker, console)
    except KvtrieError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130


def _run(options: Options, speaker: Speaker, console: Console) -> int:
    opening = speaker.opening(SYSTEM)
    questions = [[speaker.turn(text) for text in chat] for chat in CHATS]
    tiers = _tiers(options, len(opening), questions)
    manager = BlockManager(
        ModelShape.from_config(
            speaker.model.config, dtype="float32", fingerprint=fingerprint(speaker.model)
        ),
        tiers,
        block_tokens=_BLOCK_TOKENS,
        structure=options.structure,
        cost=Cost(ns_per_token=pace(speaker, opening)),
    )
    record = _Record()
    grids: list[NDArray[np.int8]] = []
    histories = [list(opening) for _ in CHATS]
    order = random.Random(options.seed)  # noqa: S311 - an order of turns needs no secrecy
    pools = open_pools(manager.model, manager.tiers, _BLOCK_TOKENS)
    with Executor(manager, pools) as executor:
        found = executor.restore()
        since = executor.clock()
        _greet(console, speaker, options, manager, found)
        rounds = [order.sample(range(len(CHATS)), len(CHATS)) for _ in range(_TURNS)]
        turns = [(turn, chat) for turn, chats in enumerate(rounds) for chat in chats]
        with Progress(console=Console(stderr=True), transient=True) as bar:
            for turn, chat in bar.track(turns, description="Turns"):
                prompt = histories[chat] + questions[chat][turn]
                result = take(
                    speaker,
                    executor,
                    prompt,
                    chat=chat + 1,
                    turn=turn + 1,
                    answer_tokens=options.answer_tokens,
                    since=since,
                )
                answer = [token for token in result.answer if token != speaker.stop]
                histories[chat] = prompt + answer
                record.turns.append(result)
                grids = [grid(manager, tokens, executor.clock()) for tokens in histories]
                common = len(opening) // _BLOCK_TOKENS
                record.shares.append(share(grids, common, len(tiers)))
        executor.save()
    kinds = [tier.kind for tier in tiers]
    found_gains = gains(record.turns, kinds)
    console.print(gain_table(found_gains, timed=not options.tiny))
    print_turns(console, speaker, record.turns, kinds, timed=not options.tiny)
    ok, sentence = _verdict(record.turns, options.structure, timed=not options.tiny)
    console.print(f"\n[{'green' if ok else 'bold red'}]{sentence}[/]")
    title = f"{speaker.name}, {len(CHATS)} conversations, structure {options.structure}"
    chats = {f"chat {number}": tokens for number, tokens in enumerate(histories, 1)}
    if options.picture is not None:
        draw(options.picture, title, record.shares, list(chats), grids)
        console.print(f"Picture: {escape(str(options.picture))}")
    if options.save is not None:
        write_report(options.save, capture(manager, title, chats, executor.clock()))
        console.print(f"Report: {escape(str(options.save))}")
    if options.json:
        document = {"model": speaker.name, "options": asdict(options), "restored": found}
        document |= {"ok": ok, "verdict": sentence} | _document(record, manager)
        document |= {"gains": [asdict(each) for each in found_gains]}
        sys.stdout.write(json.dumps(document, default=str) + "\n")
    return 0 if ok else 1


def _document(record: _Record, manager: BlockManager) -> dict[str, Any]:
    """Return turns, shares of tiers and the tiers, for a script."""
    counted = manager.stats().tiers
    return {
        "shares": record.shares,
        "turns": [asdict(turn) for turn in record.turns],
        "tiers": [
            {"kind": tier.kind, "blocks": tier.blocks, "policy": counted[tier.kind].policy}
            for tier in manager.tiers
        ],
    }


def _tiers(
    options: Options, opening: int, questions: Sequence[Sequence[Sequence[int]]]
) -> list[Tier]:
    """Return tiers for the wanted shares of all KV, the first with room for any conversation."""
    lengths = [
        opening + sum(len(turn) + options.answer_tokens for turn in chat) for chat in questions
    ]
    common = opening // _BLOCK_TOKENS
    blocks = [-(-length // _BLOCK_TOKENS) for length in lengths]
    total = common + sum(count - common for count in blocks)
    gpu = max(*blocks, round(total * options.gpu_share))
    host = max(1, round(total * options.host_share))
    layers = options.structure == "holes"
    lane = Lane("gpu-host", bytes_per_s=4e9)
    tiers = [
        Tier("gpu", blocks=gpu, layer_slots=layers),
        Tier("host", blocks=host, layer_slots=layers, read=lane, store=lane),
    ]
    if options.disk is not None:
        disk = max(1, round(total * options.disk_share))
        tiers.append(Tier("disk", blocks=disk, path=str(options.disk)))
    return tiers


def _greet(
    console: Console, speaker: Speaker, options: Options, manager: BlockManager, found: int
) -> None:
    rooms = ", ".join(f"{tier.blocks} on {tier.kind}" for tier in manager.tiers)
    mib = manager.model.block_bytes(_BLOCK_TOKENS) / 2**20
    console.print(
        f"[bold]{speaker.name}[/]: {len(CHATS)} conversations of {_TURNS} turns, "
        f"structure [bold]{options.structure}[/]; room for blocks of {mib:.2f} MiB: {rooms}."
    )
    if options.disk is not None:
        console.print(f"{found} blocks of an earlier run are in {escape(str(options.disk))}.")


def _verdict(turns: Sequence[Turn], structure: str, *, timed: bool = True) -> tuple[bool, str]:
    wrong = [turn for turn in turns if turn.verdict == "differs"]
    ties = sum(turn.verdict == "tie" for turn in turns)
    holes, sooner = sum(turn.holes for turn in turns), sum(turn.sooner for turn in turns)
    largest = max(turn.difference for turn in turns)
    if wrong:
        return False, (
            f"{len(wrong)} of {len(turns)} answers differ from the uncached ones; the first is "
            f"chat {wrong[0].chat}, turn {wrong[0].turn}; logits differ by up to {largest:.1e}."
        )
    if structure == "holes" and not holes:
        return False, (
            f"All {len(turns)} answers equal the uncached ones, but none of their tokens was "
            "recomputed in a hole, so nothing is shown: give less room by --gpu-share, "
            "--host-share or --disk-share."
        )
    reused = sum(sum(turn.reused) for turn in turns)
    prompt_tokens = sum(turn.prompt for turn in turns)
    earlier = round(sum(turn.earlier for turn in turns))
    left = f", {earlier} of them left on disk by an earlier run," if earlier else ""
    first, uncached = sum(turn.first_s for turn in turns), sum(turn.uncached_s for turn in turns)
    chosen = f", {sooner} since that was sooner than loading them" if sooner else ""
    tied = f" ({ties} by the tie rule: margin below {TIE}, logits within {AGREE})" if ties else ""
    took = f" The first tokens took {first:.1f} s in all, without kvtrie {uncached:.1f} s."
    took = took if timed else ""
    return True, (
        f"All {len(turns)} answers equal the uncached ones{tied}; logits differ by at most "
        f"{largest:.1e}. Of {prompt_tokens} prompt tokens {round(reused)} were reused{left} and "
        f"{holes} recomputed in holes{chosen}.{took}"
    )
