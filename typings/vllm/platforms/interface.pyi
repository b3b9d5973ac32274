# Written by tests/served/stubs.py out of the installed package: do not edit.

class Platform:
    def is_cpu(self) -> bool: ...
