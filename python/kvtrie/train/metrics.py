"""Metrics: the log of each step of a run, for people and for programs.

Invariant: `metrics.jsonl` has one line per step, in order, also after a resumed run.
Cost: a line per step.
"""

# pyright: reportUnknownMemberType=false
# (matplotlib leaves its keyword arguments untyped)

from __future__ import annotations

import json
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.canvas import INK, figure, save
from kvtrie.train.files import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from kvtrie.train.evaluate import Measured

__all__ = ["Metrics", "peak_device_bytes", "peak_host_bytes"]

_KIB = 1 if sys.platform == "darwin" else 1024


class Metrics:
    """The lines of a run.

    Args:
        folder: folder of the run.
        start: last step before a resumed run. Lines of later steps are dropped.
    """

    def __init__(self, folder: Path, start: int) -> None:
        self._folder, self._path = folder, folder / "metrics.jsonl"
        self._lines: list[dict[str, Any]] = []
        if start and self._path.is_file():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    read = json.loads(line)
                except ValueError:
                    continue  # a crash may leave half a line
                if read["step"] <= start:
                    self._lines.append(read)
        text = "".join(json.dumps(each) + "\n" for each in self._lines)
        write_whole(self._path, text.encode())

    def step(
        self,
        step: int,
        *,
        total: int,
        loss: float,
        rate: float,
        tokens_per_second: float,
        left: float,
    ) -> str:
        """Record a step and return its line for the report."""
        device, host = peak_device_bytes(), peak_host_bytes()
        self._note(
            step=step,
            loss=loss,
            learning_rate=rate,
            tokens_per_second=tokens_per_second,
            peak_device_bytes=device,
            peak_host_bytes=host,
        )
        memory_text = f"{device / 1e9:.2f} GB device, " if device else ""
        return (
            f"step {step}/{total}: loss {loss:.4f}, {tokens_per_second:.0f} tokens/s, {memory_text}"
            f"{host / 1e9:.2f} GB host, {_spoken(left)} left\n"
        )

    def validation(self, step: int, found: Measured) -> str:
        """Record a validation and return its line for the report."""
        self._note(step=step, validation_loss=found.loss, exact=found.exact, cases=found.cases)
        exact = "" if found.exact is None else f", {100 * found.exact:.1f} % exact"
        return f"validation after step {step}: loss {found.loss:.4f}{exact}, {found.cases} cases\n"

    def _note(self, **line: Any) -> None:  # noqa: ANN401 - numbers
        self._lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def plot(self) -> None:
        """Plot the losses to `loss.png`."""
        drawn = figure("Loss", 5)
        axes = drawn.subplots()
        for key, colour in (("loss", "#8fbce6"), ("validation_loss", INK)):
            points = [(each["step"], each[key]) for each in self._lines if key in each]
            if points:
                steps, losses = zip(*points, strict=True)
                mark = "o" if key == "validation_loss" else None
                axes.plot(steps, losses, label=key.replace("_", " "), marker=mark, color=colour)
        axes.set_xlabel("optimiser steps")
        axes.set_ylabel("loss")
        if self._lines:
            axes.legend()
        save(drawn, self._folder / "loss.png")


def peak_host_bytes() -> int:
    """Return the peak memory of the process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def peak_device_bytes() -> int:
    """Return torch's peak device memory, 0 without a device."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _spoken(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
