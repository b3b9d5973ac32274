"""Optimisers: one table of torch's, and the arguments that users name.

Invariant: what is left out keeps torch's default; what an optimiser does not know is refused.
Cost: that of the optimiser.
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
"""Optimisers by name; another one takes one line."""

# Users' names and torch's names for them; those that an optimiser has apply.
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
    """An optimiser and its arguments; None keeps torch's default.

    Attributes:
        name: Adam, AdamW, Adamax, Adadelta, RMSprop or SGD.
        learning_rate: of the steps; the largest, where the rate rises and falls.
        weight_decay: of the weights.
        eps: added to denominators.
        momentum: of RMSprop and SGD.
        dampening: of SGD's momentum.
        adam_betas: of Adam, AdamW and Adamax.
        adadelta_rho: of Adadelta.
        rmsprop_alpha: of RMSprop.

    Raises:
        ConfigError: a name or a number that cannot be, or an argument that the optimiser lacks.
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
        """Arguments of torch's class.

        Raises:
            ConfigError: an argument that it does not know.
        """
        accepted = inspect.signature(OPTIMISERS[self.name]).parameters
        made: dict[str, Any] = {}
        for name, theirs in _NAMES.items():
            given = getattr(self, name)
            if given is None:
                continue
            found = [each for each in theirs if each in accepted]
            # NAdam's and others' `alpha` would be another thing than RMSprop's.
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
    """The optimiser of some parameters."""
    kind: Any = OPTIMISERS[settings.name]
    return kind(parameters, **settings.arguments())
