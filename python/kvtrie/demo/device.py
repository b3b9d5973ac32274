"""Device: finds the device of a model by its name on the command line.

Invariant: a returned device can hold a tensor. Cost: an empty tensor.
"""

from __future__ import annotations

import torch

from kvtrie.errors import ConfigError

__all__ = ["device"]


def device(given: str | None) -> str:
    """Return the named device, or else the first accelerator, or else the CPU.

    Args:
        given: a name as "cpu" or "cuda:1", or the number of a CUDA device.

    Raises:
        ConfigError: an unavailable device.
    """
    if given is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if found is None else found.type
    name = f"cuda:{given}" if given.isdecimal() else given
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"--device {given}: no device {name!r} is available: {first}") from error
    return name
