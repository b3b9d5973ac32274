"""Arguments of service calls: prompts, deadlines, names of requests.

Invariant: results can be sent as JSON. Invalid arguments raise a `ConfigError` with the value.
Cost: a pass over a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import real, shown, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["deadline", "prompt", "request_name"]

_MOST_TOKEN = 2**32 - 1
_MOST_TOKENS = 2**24
_MOST_S = 3600.0


def prompt(tokens: Sequence[int] | NDArray[np.integer[Any]]) -> list[int]:
    """Return a prompt as a list.

    Args:
        tokens: `(tokens,)` of integers 0 to 2^32 - 1.

    Raises:
        ConfigError: no sequence of integers, an integer out of range, or more than 2^24 integers.
    """
    if isinstance(tokens, (str, bytes)) or not hasattr(tokens, "__len__"):
        raise ConfigError(f"tokens is {shown(tokens)}, a sequence of integers wanted")
    if len(tokens) > _MOST_TOKENS:
        raise ConfigError(f"tokens has {len(tokens)} items, at most {_MOST_TOKENS} wanted")
    try:
        found = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"tokens is {shown(tokens)}: {error}") from error
    if found.size == 0 and found.ndim == 1:
        return []
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError(
            f"tokens is an array of {found.dtype}{list(found.shape)}, integers (tokens,) wanted"
        )
    low, high = int(found.min()), int(found.max())
    if low < 0 or high > _MOST_TOKEN:
        raise ConfigError(f"tokens are {low} to {high}, 0 to {_MOST_TOKEN} wanted")
    return found.tolist()


def deadline(seconds: object) -> float:
    """Return the maximum duration of a call in seconds.

    Raises:
        ConfigError: no number above 0, or more than an hour.
    """
    found = real("deadline_s", seconds, 0.0, _MOST_S)
    if found == 0.0:
        raise ConfigError("deadline_s is 0, above 0 wanted")
    return found


def request_name(request_id: object) -> str:
    """Return the name of a request.

    Raises:
        ConfigError: no str, an empty str, or more than 65 535 bytes.
    """
    found = text("request_id", request_id)
    if not found:
        raise ConfigError("request_id is empty")
    return found
