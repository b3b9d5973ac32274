"""The picture of a play: hits and time to first token while an engine is killed and comes back.

Cost: about a second.
"""

# pyright: reportUnknownMemberType=false
# (matplotlib leaves its keyword arguments untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.canvas import INK, figure, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from examples.cluster.play import Played

_COLOURS = ("#9a9a9a", "#1b4f8a")
_WINDOW = 20  # turns of a moving mean


def draw(path: Path, plays: dict[str, Played]) -> None:
    """Write the picture.

    Args:
        path: where to write.
        plays: what was played, by router; at most two.

    Raises:
        ConfigError: the file cannot be written, or matplotlib is not installed.
    """
    drawn = figure("Three engines; one is killed and starts again", 7.6)
    axes: Any = drawn.subplots(2, 1, sharex=True)
    for (name, played), colour in zip(plays.items(), _COLOURS, strict=False):
        turns = sorted(played.turns, key=lambda turn: turn.at)
        times = [turn.at for turn in turns]
        found = [100 * turn.found / turn.prompt for turn in turns]
        first = [1e3 * turn.first_token_s for turn in turns]
        label = f"{name}: {100 * played.found:.0f} %, {played.computed:,} tokens computed"
        axes[0].plot(times, _means(found), color=colour, label=label)
        axes[1].plot(times, _means(first), color=colour)
        axes[1].plot(times, first, ".", color=colour, alpha=0.35, markersize=4)
        for at, what in played.marks:
            style = "--" if "killed" in what else ":"
            for one in axes:
                one.axvline(at, color=colour, linestyle=style, linewidth=0.9)
    axes[0].set_ylabel(f"prompt tokens found, %\n(mean of {_WINDOW} turns)", color=INK)
    axes[1].set_ylabel(f"time to first token, ms\n(turns, mean of {_WINDOW})", color=INK)
    axes[1].set_yscale("log")
    axes[1].set_xlabel("seconds; dashed: the engine is killed, dotted: it starts again", color=INK)
    axes[0].set_ylim(0, 100)
    axes[0].legend(frameon=False)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    save(drawn, path)


def _means(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, of `_WINDOW` at most."""
    found: list[float] = []
    for at in range(len(values)):
        window = values[max(0, at + 1 - _WINDOW) : at + 1]
        found.append(sum(window) / len(window))
    return found
