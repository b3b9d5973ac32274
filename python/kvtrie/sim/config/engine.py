"""Table `engine`: how a machine runs its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import flag

if TYPE_CHECKING:
    from kvtrie.sim.config.table import Table

__all__ = ["engine_of"]


def engine_of(table: Table, machines: int) -> dict[str, Any]:
    """Return the engine's arguments of `Simulation`."""
    kind = table.word("kind", ("serial", "continuous", "disaggregated"))
    more: dict[str, Any] = {"engine": kind, "wait": table.word("wait", ("all", "layer", "step"))}
    if kind != "serial":
        more["token_budget"] = table.number("token_budget", 2048, 1, 2**31 - 1)
        most = min(256, more["token_budget"])
        more["max_running"] = table.number("max_running", most, 1, more["token_budget"])
        one_by_one = table.take("token_by_token", False)  # noqa: FBT003
        more["token_by_token"] = flag(table.key("token_by_token"), one_by_one)
        more["answers"] = table.word("answers", ("released", "cached"))
    if kind == "disaggregated":
        if machines == 1:
            raise ConfigError('machines is 1: engine.kind = "disaggregated" wants at least 2')
        more["prefill"] = table.number("prefill", 1, 1, machines - 1)
    table.close()
    return more
