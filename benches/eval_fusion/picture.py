"""Picture: recovered by selection, one panel per kind, with intervals and goals.

Cost: a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benches.eval_fusion.summary import MEAN
from kvtrie.canvas import figure, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benches.eval_fusion.summary import Line

INK, POINT, GOAL = "#333333", "#1b4f8a", "#c0392b"
LEAST = -0.25
"""The left end of the axes; what is worse is drawn there."""


def draw(path: Path, title: str, lines: Sequence[Line], kinds: Sequence[str]) -> None:
    """Write the picture, of the kind that `path` ends in; the first line, plain reuse, is its zero.

    Raises:
        ConfigError: the file cannot be written.
    """
    shown = lines[1:]
    drawn = figure(title, 1.6 + 0.35 * len(shown))
    panels = drawn.subplots(1, len(kinds) + 1, sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, (MEAN, *kinds), strict=True):
        for at, line in enumerate(shown):
            if (found := line.recovered.get(kind)) is not None:
                value, low, high = (max(LEAST, each) for each in found)
                panel.plot([low, high], [at, at], color=POINT, linewidth=1.5)
                panel.plot([value], [at], "o", color=POINT)
            if (goal := line.row.goals.get(kind)) is not None:
                panel.plot([goal, goal], [at - 0.3, at + 0.3], color=GOAL, linewidth=2)
        panel.axvline(0, color=INK, linewidth=0.8)
        panel.set_xlim(LEAST - 0.05, 1.05)
        panel.set_title("mean of kinds" if kind == MEAN else kind, color=INK, fontsize=11)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    panels[0].set_yticks(
        range(len(shown)), [f"{line.row.name} {line.row.ratio:.2f}" for line in shown]
    )
    panels[0].invert_yaxis()
    drawn.supxlabel(
        "recovered: 1 - KL / KL of plain reuse, with 95 % intervals; red: goal of the lower end",
        color=INK,
        fontsize=10,
    )
    save(drawn, path)
