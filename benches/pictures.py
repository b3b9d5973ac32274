"""The pictures of the documentation, drawn from the records in `benches/results`.

    python -m benches.pictures

Each picture keeps the figures that it shows in its PNG, so that a test compares them with the
records. Cost: a second per picture.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benches.pages import write_part
from kvtrie.canvas import INK, figure
from kvtrie.output import write_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
README = ROOT / "README.md"
RESULTS = ROOT / "benches/results"
FIGURES = "Description"  # the text chunk of a PNG that holds its figures
OURS, OTHER, PLAIN = "#1b4f8a", "#d98c21", "#9a9a9a"


def first_token(record: dict[str, Any]) -> dict[str, float]:
    """Milliseconds to the first token of a returning chat, by where its KV comes from."""
    servers = record["servers"]

    def loaded(name: str) -> float:
        return 1e3 * median(took for took, _ in servers[name]["found"])

    figures = {"computed again": 1e3 * median(servers["none"]["computed_s"])}
    figures["vLLM's own offloading, from host memory"] = loaded("offload")
    if "restart" in servers:
        figures["kvtrie, from disk after a restart"] = loaded("restart")
    figures["kvtrie, from disk"] = loaded("disk")
    figures["kvtrie, from host memory"] = loaded("host")
    return {name: round(ms) for name, ms in figures.items()}


def draw_first_token(figures: dict[str, float]) -> Figure:
    """Draw bars, one per place that the KV comes from."""
    computed, best = figures["computed again"], min(figures.values())
    times = f"{computed / best:.0f} times sooner"
    drawn = figure(f"A returning chat of 2,000 tokens answers {times} from host memory", 3.4)
    axes = drawn.subplots()
    names = list(reversed(figures))
    colours = [OURS if "kvtrie" in name else OTHER if "vLLM" in name else PLAIN for name in names]
    bars = axes.barh(names, [figures[name] for name in names], color=colours, height=0.62)
    axes.bar_label(bars, fmt="{:,.0f} ms", padding=4, color=INK)
    axes.set_xlim(0, 1.12 * computed)
    axes.set_xlabel("time to first token, ms (median; SmolLM2-135M, float32, vLLM on 2 CPU cores)")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return drawn


def caption(figures: dict[str, float]) -> str:
    """The sentence of README.md about the first tokens."""
    computed = figures["computed again"]
    others = [f"{name} {ms} ms" for name, ms in figures.items() if "kvtrie" in name]
    other = next(ms for name, ms in figures.items() if "vLLM" in name)
    return (
        "Time to first token of a chat of 2,000 tokens that returns: "
        f"computed again {computed:,} ms; {'; '.join(reversed(others))}; vLLM's own offloading from host memory {other} ms."
    )


PICTURES: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Figure]]] = {
    "first-token": ("engines", first_token, draw_first_token),
}
"""By picture: the record, the figures that are shown, and the function that draws them."""


def shown(name: str) -> Any:
    """The figures that a picture has to show, from its record."""
    record, figures_of, _ = PICTURES[name]
    return figures_of(json.loads((RESULTS / f"{record}.json").read_text()))


def draw(name: str, folder: Path = IMAGES) -> None:
    """Draw a picture again from its record."""
    figures = shown(name)
    out = io.BytesIO()
    metadata = {FIGURES: json.dumps(figures)}
    PICTURES[name][2](figures).savefig(out, dpi=110, format="png", metadata=metadata)
    write_output(folder / f"{name}.png", out.getvalue())


def main() -> int:
    """Draw every picture, and write the figures of the first one into README.md."""
    for name in PICTURES:
        draw(name)
    write_part(README, "first-token", caption(shown("first-token")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
