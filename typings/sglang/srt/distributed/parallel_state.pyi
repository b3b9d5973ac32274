# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

def get_world_group() -> GroupCoordinator: ...

class GroupCoordinator:
    world_size: int
    cpu_group: Any
