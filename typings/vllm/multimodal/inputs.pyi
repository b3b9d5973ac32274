# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any
import torch

@dataclass(init=False)
class MultiModalFeatureSpec:
    data: MultiModalKwargsItem | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None

class MultiModalKwargsItem:
    def get_data(
        self,
    ) -> dict[str, list[Any] | list[torch.Tensor] | Any | tuple[torch.Tensor, ...]]: ...

@dataclass(init=False)
class PlaceholderRange:
    offset: int
    length: int
    is_embed: torch.Tensor | None
