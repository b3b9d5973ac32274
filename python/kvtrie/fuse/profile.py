"""Profile: measured speeds of a machine, from a file of `kvtrie profile`.

Invariant: an invalid file is refused whole. Cost: reading a small file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.fuse.passes import Device, PassTable
from kvtrie.input import read_text, toml_of
from kvtrie.model.cost import Cost
from kvtrie.settings.tier import Lane

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Profile", "load_profile"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile written by `kvtrie profile`.

    Attributes:
        cost: cost for `BlockManager(cost=...)`, None if no model was measured.
        lanes: lanes for `Tier(read=..., store=...)`, by name.
        both: by kind of tier, the relative increase of a load's time while a store runs in the
            opposite direction.
        passes: times of the model's passes, None if no model was measured.
        device: speeds of the computing device, None if not measured.
    """

    cost: Cost | None
    lanes: dict[str, Lane]
    both: dict[str, float]
    passes: PassTable | None = None
    device: Device | None = None


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: the file is no profile.
    """
    wrong = f"{path} is no profile of `kvtrie profile`"
    parsed = toml_of(read_text(path, "the profile"), wrong)
    try:
        cost = parsed.get("cost")
        table = cost and tuple((int(at), float(each)) for at, each in cost["table"])
        return Profile(
            Cost(table=table, ns_per_token=float(cost["ns_per_token"])) if cost and table else None,
            {
                name: Lane(name, float(each["bytes_per_s"]), int(each["latency_ns"]))
                for name, each in parsed.get("lanes", {}).items()
            },
            {kind: float(share) for kind, share in parsed.get("both", {}).items()},
            _passes(parsed["passes"]) if "passes" in parsed else None,
            Device(**{name: float(parsed["compute"][name]) for name in Device._fields})
            if "compute" in parsed
            else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{wrong}: {error}") from error


def _passes(parsed: dict[str, Any]) -> PassTable:
    rows = tuple(tuple(float(ns) for ns in row) for row in parsed["ns"])
    return PassTable(tuple(map(int, parsed["contexts"])), tuple(map(int, parsed["tokens"])), rows)
