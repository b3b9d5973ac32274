"""LayerOrder: the order in which a pass reaches the layers of each group.

Moves count layers within their group. A pass counts the layers of the model, of which several
groups have one each, or the same one (attention and a state).
Invariant: with one group both count alike. Cost: a look into a table.
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
        groups: of each group its layers of the model, ascending.

    Attributes:
        layers: layers of the model, up to the last one of a group.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self.layers = 1 + max(group[-1] for group in groups)
        self._places = [{layer: at for at, layer in enumerate(group)} for group in groups]
        self._before = [
            [sum(own <= layer for own in group) for layer in range(self.layers)] for group in groups
        ]

    def place(self, job: Job, layer: int) -> int | None:
        """The number in its group of a layer of the model; None if a job does not bring it."""
        at = self._places[job.group].get(layer, -1)
        return at if job.layers[0] <= at < job.layers[1] else None

    def at(self, job: Job, layer: int) -> int:
        """The number in its group of a layer of the model that a job brings."""
        return self._places[job.group][layer]

    def first(self, job: Job) -> int:
        """The first layer of the model that a job brings."""
        return self._groups[job.group][job.layers[0]]

    def there(self, job: Job, layer: int) -> bool:
        """Whether a job has brought all that a pass needs of its group up to a layer."""
        return job.there >= self._before[job.group][layer]
