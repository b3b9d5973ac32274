"""LayerOrder: maps the layers of the model to the layers of each group.

Moves count layers within their group. A pass counts the layers of the model. Groups have different
layers of the model, or share them (attention and a state).
Invariant: with a single group both counts are equal.
Cost: a table lookup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.transfer.job import Job

__all__ = ["LayerOrder"]


class LayerOrder:
    """The layers of some groups.

    Args:
        groups: the ascending layers of the model in each group.

    Attributes:
        layers: layers of the model, up to the last layer of any group.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self.layers = 1 + max(group[-1] for group in groups)
        self._places = [{layer: at for at, layer in enumerate(group)} for group in groups]
        self._before = [
            [sum(own <= layer for own in group) for layer in range(self.layers)] for group in groups
        ]

    def place(self, job: Job, layer: int) -> int | None:
        """Return a layer's number in the job's group, or None if the job does not load it."""
        at = self._places[job.group].get(layer, -1)
        return at if job.layers[0] <= at < job.layers[1] else None

    def at(self, job: Job, layer: int) -> int:
        """Return a layer's number in the job's group, for a layer loaded by the job."""
        return self._places[job.group][layer]

    def first(self, job: Job) -> int:
        """Return the first layer of the model loaded by a job."""
        return self._groups[job.group][job.layers[0]]

    def has_copied(self, job: Job, layer: int) -> bool:
        """Return whether a job has loaded its group's layers up to a layer of the model."""
        return job.copied_to >= self._before[job.group][layer]
