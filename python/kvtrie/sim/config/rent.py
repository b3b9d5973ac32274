"""Table `price`: price of machines per hour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier
    from kvtrie.sim.config.table import Table

__all__ = ["Rent", "rent_of"]

_KINDS = ("gpu", "host", "disk", "remote")
_MOST = 1e9
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Rent:
    """Prices per hour, in any currency.

    Attributes:
        gpu_hour: price of a machine's GPUs, including their memory.
        gib_hour: price per GiB of a tier, by kind. Missing kinds are free.
    """

    gpu_hour: float = 0.0
    gib_hour: dict[str, float] = field(default_factory=dict[str, float])

    def per_hour(self, tier: Tier, model: ModelShape, block_tokens: int) -> float:
        """Return the price of a tier per hour."""
        return self.gib_hour.get(tier.kind, 0.0) * tier.room_bytes(model, block_tokens) / _GIB


def rent_of(table: Table) -> Rent | None:
    """Return the prices of a table, or None if it is empty."""
    gpu_hour = table.real("gpu_hour", 0.0, 0, _MOST)
    kinds = table.table("gib_hour")
    gib_hour = {kind: kinds.real(kind, 0.0, 0, _MOST) for kind in _KINDS}
    kinds.close()
    table.close()
    rent = Rent(gpu_hour, {kind: price for kind, price in gib_hour.items() if price})
    return None if rent == Rent() else rent
