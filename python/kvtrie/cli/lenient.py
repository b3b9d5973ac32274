"""Warn if `--lenient` left out more than a few lines of a trace.

Invariant: the warning precedes all figures, on standard error. Cost: none.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["lenient_status", "status_of"]

_MOST = 0.1
_FAILED = 1


def lenient_status(skipped: int, read: int) -> int:
    """Return the exit status of a run with `--lenient`: 1 if it left out more than a tenth."""
    if skipped <= _MOST * (skipped + read):
        return 0
    sys.stderr.write(
        f"--lenient left out {skipped} of {skipped + read} lines of the trace, more than a tenth: "
        "the figures are those of the rest\n"
    )
    return _FAILED


def status_of(figures: dict[str, Any]) -> int:
    """Return the exit status for the figures of a simulation."""
    return lenient_status(figures.get("skipped_lines", 0), figures.get("kept_lines", 0))
