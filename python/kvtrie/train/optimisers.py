"""Optimisers: a table of torch's optimisers, and the users' names of arguments.

Invariant: omitted arguments keep torch's defaults, and arguments unknown to an optimiser are
refused. Cost: the optimiser.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (torch leaves parts untyped)

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import few, put, real, word

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OPTIMISERS", "OptimizerSettings", "make_optimizer"]

OPTIMISERS: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "SGD": torch.optim.SGD,
}
"""Optimisers by name."""

# Users' names and torch's names. Only names known to the optimiser apply.
_NAMES = {
    "learning_rate": ("lr",),
    "weight_decay": ("weight_decay",),
    "eps": ("eps",),
    "momentum": ("momentum",),
    "dampening": ("dampening",),
    "adam_betas": ("betas",),
    "adadelta_rho": ("rho",),
    "rmsprop_alpha": ("alpha",),
}


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """An optimiser and its arguments. None keeps torch's default.

    Attributes:
        name: Adam, AdamW, Adamax, Adadelta, RMSprop or SGD.
        learning_rate: peak learning rate of the schedule.
        weight_decay: weight decay.
        eps: added to denominators.
        momentum: momentum of RMSprop and SGD.
        dampening: dampening of SGD's momentum.
        adam_betas: betas of Adam, AdamW and Adamax.
        adadelta_rho: rho of Adadelta.
        rmsprop_alpha: alpha of RMSprop.

    Raises:
        ConfigError: an unknown name, a number out of range, or an argument unknown to the
            optimiser.
    """

    name: str = "AdamW"
    learning_rate: float | None = None
    weight_decay: float | None = None
    eps: float | None = None
    momentum: float | None = None
    dampening: float | None = None
    adam_betas: tuple[float, float] | None = None
    adadelta_rho: float | None = None
    rmsprop_alpha: float | None = None

    def __post_init__(self) -> None:
        word("optimizer", self.name, OPTIMISERS)
        for name in _NAMES:
            given = getattr(self, name)
            if given is None:
                continue
            if name == "adam_betas":
                both = few(name, given, 2)
                if len(both) != 2:  # noqa: PLR2004 - two betas
                    raise ConfigError(f"adam_betas are two numbers, not {len(both)}")
                put(self, adam_betas=tuple(real(name, each, 0, 1, open_end=True) for each in both))
            else:
                put(self, **{name: real(name, given, 0, math.inf)})
        self.arguments()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's class.

        Raises:
            ConfigError: an argument unknown to the class.
        """
        accepted = inspect.signature(OPTIMISERS[self.name]).parameters
        made: dict[str, Any] = {}
        for name, theirs in _NAMES.items():
            given = getattr(self, name)
            if given is None:
                continue
            found = [each for each in theirs if each in accepted]
            # `alpha` of further optimisers is not the same as RMSprop's.
            if not found or (name == "rmsprop_alpha" and self.name != "RMSprop"):
                takes = [each for each, names in _NAMES.items() if set(names) & set(accepted)]
                raise ConfigError(
                    f"optimizer {self.name} has no argument {name} ({given}): it takes "
                    f"{', '.join(takes)}"
                )
            made[found[0]] = given
        return made


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """Return an optimiser of some parameters."""
    kind: Any = OPTIMISERS[settings.name]
    return kind(parameters, **settings.arguments())
