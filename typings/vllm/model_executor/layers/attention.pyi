# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class Attention:
    attn_backend: Any
    impl: Any
