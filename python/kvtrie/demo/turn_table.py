"""Table of a demo's turns: the meaning of each column, and a line per turn.

Cost: a line per turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from kvtrie.printable import MESSAGE, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvtrie.demo.model import Speaker
    from kvtrie.demo.turn import Turn

__all__ = ["columns", "print_turns"]


def print_turns(
    console: Console,
    speaker: Speaker,
    turns: Sequence[Turn],
    tiers: Sequence[str],
    *,
    timed: bool,
) -> None:
    """Print the meaning of each column, and a line per turn.

    Args:
        console: output.
        speaker: turns tokens of answers into text.
        turns: the turns, in their order.
        tiers: kinds of the tiers, fastest first.
        timed: print first-token times.
    """
    kinds = "".join(f"{kind:>6}" for kind in tiers)
    over = f"{'reused from':{len(kinds)}}"
    times = (" first token, ms │", " kvtrie  without │") if timed else ("", "")
    console.print(
        "".join(f"\n  [bold]{name:11}[/] {meaning}" for name, meaning in columns(timed=timed))
    )
    console.print(
        f"\n[dim]                  │ {over} │     recomputed      │{times[0]}\n"
        f"chat turn  prompt │{kinds}  │ holes  sooner   end │{times[1]} answer[/]"
    )
    for turn in turns:
        _print_turn(console, speaker, turn, timed=timed)


def columns(*, timed: bool) -> list[tuple[str, str]]:
    """Return name and meaning of each column of the table."""
    rows = [
        ("prompt", "tokens of the conversation so far, with the new question"),
        ("reused from", "tokens whose KV was found, by tier"),
        ("holes", "tokens computed again because their blocks had been dropped"),
        ("sooner", "tokens computed again because that is faster than loading them"),
        ("end", "tokens after the last block that was found: the new question"),
    ]
    if timed:  # a forward pass of the tiny model is shorter than any bookkeeping
        rows.append(("first token", "milliseconds with kvtrie, and without any reuse"))
    mark = "the answer and a check: = the same tokens as without kvtrie, ≈ a tie, ≠ others"
    return [*rows, ("answer", mark)]


def _print_turn(console: Console, speaker: Speaker, turn: Turn, *, timed: bool) -> None:
    reused = "".join(f"{round(tokens):6d}" for tokens in turn.reused)
    holes = f"[yellow]{turn.holes:5d}[/]" if turn.holes else f"{turn.holes:5d}"
    mark = {"equal": "[green]=[/]", "tie": "[yellow]≈[/]", "differs": "[bold red]≠[/]"}
    text = printable(" ".join(speaker.text(turn.answer).split()), MESSAGE)
    times = f" {turn.first_s * 1e3:6.0f}  {turn.uncached_s * 1e3:7.0f} │" if timed else ""
    console.print(
        f"{turn.chat:4d} {turn.turn:4d} {turn.prompt:7d} │{reused}  │ "
        f"{holes}  {turn.sooner:6d} {turn.end:5d} │"
        f"{times}"
        f" {mark[turn.verdict]} {escape(text)}",
        no_wrap=True,
        soft_wrap=False,
        overflow="ellipsis",
    )
