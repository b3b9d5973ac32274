"""Check: a line of `kvtrie doctor`.

Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "gb"]

_GB = 10**9


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check.

    Attributes:
        state: "ok", "warning" or "error".
        name: the property.
        found: its value here.
        fix: the command to change it, "" if it is good.
    """

    state: Literal["ok", "warning", "error"]
    name: str
    found: str
    fix: str = ""


def gb(size: int) -> str:
    """Return bytes as `8.6 GB`."""
    return f"{size / _GB:.1f} GB"
