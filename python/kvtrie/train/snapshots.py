"""Snapshots: memory snapshots of a GPU during parts of a step, for torch's viewer.

Invariant: without snapshots nothing is recorded. Cost: torch's memory history.
"""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
# (torch's memory history has no public name)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Snapshots"]

_ROWS, _FIRST, _WHOLE = 1, 2, 3


class Snapshots:
    """Files under `gpu_memory_snapshots/iterationN` of a run's folder.

    Kind 0 writes `snapshot_initial.pickle` (up to the backward pass of the top row of cells) and
    `snapshot_layerN.pickle` of each row, named by its first layer. Kind 1 writes only the rows,
    kind 2 both, only in the first step, and kind 3 `snapshot.pickle` of the whole step.

    Args:
        folder: folder of the run.
        entries: number of entries kept by torch. 0 records nothing.
        kind: 0 to 3.

    Raises:
        ConfigError: entries are requested without a GPU.
    """

    def __init__(self, folder: Path, entries: int, kind: int) -> None:
        self._folder, self._entries, self._kind = folder, entries, kind
        self._step = 0
        self._name: str | None = None
        if entries and not torch.cuda.is_available():
            raise ConfigError(
                f"record_gpu_memory_snapshots is {entries}, and there is no CUDA device"
            )

    def begin(self, step: int) -> None:
        """Set the current step, from 0."""
        self._step = step

    def watch(self, what: str, layer: int | None) -> None:
        """Start or end a snapshot. Callback for `watch` of `LongContextGradients`."""
        if not self._entries or (self._kind == _FIRST and self._step):
            return
        if self._kind == _WHOLE:
            if what != "row":
                self._change(None if what == "end" else "snapshot")
        elif what == "row":
            self._change(f"snapshot_layer{layer}")
        else:
            starts = what == "forward" and self._kind != _ROWS
            self._change("snapshot_initial" if starts else None)

    def _change(self, name: str | None) -> None:
        """Write the current snapshot, if any, and start a new snapshot for a name."""
        history = torch.cuda.memory
        if self._name is not None:
            path = self._folder / "gpu_memory_snapshots" / f"iteration{self._step}"
            path.mkdir(parents=True, exist_ok=True)
            history._dump_snapshot(str(path / f"{self._name}.pickle"))  # noqa: SLF001
            history._record_memory_history(enabled=None)  # noqa: SLF001
        if name is not None:
            history._record_memory_history(max_entries=self._entries)  # noqa: SLF001
        self._name = name
