"""Asked: a request as the simulator takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Asked", "AskedToEnd"]

Asked: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None]"
"""Arrival in ns, tokens as managers take them, tokens of prompt and answer, session."""

AskedToEnd: TypeAlias = "tuple[int, NDArray[np.uint32], int, int, str | None, bool]"
"""The same, and whether the session ends with it."""
