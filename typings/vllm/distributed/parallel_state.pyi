# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

def get_pp_group() -> GroupCoordinator: ...

def get_tp_group() -> GroupCoordinator: ...

class GroupCoordinator:
    rank_in_group: int
    world_size: int
    cpu_group: Any
