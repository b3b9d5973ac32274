# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass

@dataclass(init=False)
class MultiModalFeatureSpec:
    identifier: str
    mm_position: PlaceholderRange

@dataclass(init=False)
class PlaceholderRange:
    offset: int
