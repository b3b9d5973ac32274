"""Table `manager`: settings of each machine's manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.model.cost import Cost
from kvtrie.settings.argument import word
from kvtrie.settings.tier import DEFAULT_POLICY
from kvtrie.sim.config.table import Table, made, plain

if TYPE_CHECKING:
    from kvtrie.sim.config.trace import TraceSource

__all__ = ["block_tokens_of", "manager_of"]

_MOST = 2**31 - 1


def block_tokens_of(table: Table, trace: TraceSource) -> int:
    """Return the real tokens per block: a divisor of a hash's tokens for hashed traces."""
    hashes = trace.ready
    block = table.number("block_tokens", trace.hash_tokens if hashes else 16, 1, _MOST)
    if hashes and trace.hash_tokens % block:
        raise ConfigError(
            f"manager.block_tokens is {block}: {trace.hash_tokens} tokens of a hash are no whole "
            "number of such blocks"
        )
    return block


def manager_of(table: Table) -> dict[str, Any]:
    """Return the managers' arguments of `Simulation`. `cost` only if given."""
    more: dict[str, Any] = {
        "keep": table.number("keep", 1, 0, _MOST),
        "load": table.word("load", ("all", "plan", "none")),
        "policy": table.text("policy", DEFAULT_POLICY),
        "structure": table.word("structure", ("leaf-only", "holes")),
        "drop_order": table.word("drop_order", ("shallow", "seed")),
        "reuse": table.flag("reuse", default=True),
        "epsilon": table.real("epsilon", 1 / 64, 0, 1),
        "objective": table.word("objective", ("cost", "balanced", "hits")),
    }
    stated = table.take("cost")
    if isinstance(stated, str):
        more["cost"] = word(table.key("cost"), stated, ("default", "seed"))
    elif stated is not None:
        own = Table(table.key("cost"), stated)
        more["cost"] = made("manager.cost", Cost, own.some(*plain(Cost)))
        own.close()
    table.close()
    return more
