"""Cost: the time to recompute a token, as a function of its context length.

Invariant: costs are finite, above zero and never decrease with context.
Cost: a formula or a table, read once when a manager is created.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import pairs, put, real, whole

if TYPE_CHECKING:
    from kvtrie.model.shape import ModelShape

__all__ = ["Cost"]

_EVEN_CONTEXT = 10_700
_FLOPS = 1e14
_UNKNOWN_NS = 10_000.0
_MOST_POINTS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a token after `context` tokens: `(alpha * context + beta) + constant`, or a table.

    Only ratios matter to retention. `ns_per_token` converts them into predicted times:
    `ns_per_token * cost(context) / cost(0)`.

    Attributes:
        alpha: cost of attention per token of context.
        beta: cost of attention without context.
        constant: cost of everything except attention.
        table: pairs (context in tokens, cost) instead of the formula, both ascending. Costs are
            linear between points, constant before the first point, and continue the last slope
            after the last point.
        ns_per_token: nanoseconds to prefill a token without context, or None for the estimate of
            `Cost.ns_of` for the manager's model.

    Raises:
        ConfigError: a negative or infinite number, a cost of zero at context 0, or a decreasing
            table.
    """

    alpha: float = 1 / _EVEN_CONTEXT
    beta: float = 1.0
    constant: float = 0.0
    table: tuple[tuple[int, float], ...] | None = None
    ns_per_token: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "constant", "ns_per_token"):
            if (given := getattr(self, name)) is not None or name != "ns_per_token":
                put(self, **{name: real(name, given, 0, math.inf)})
        if self.table is None:
            if self.beta + self.constant <= 0:
                raise ConfigError("beta + constant is 0: a token without context must cost more")
            return
        table = tuple(
            (
                whole("context of a cost", at, 0, 2**63 - 1),
                real("cost of a table", cost, 0, math.inf),
            )
            for at, cost in pairs("table of costs", self.table, _MOST_POINTS)
        )
        put(self, table=table)
        if not table or table[0][0] < 0 or table[0][1] <= 0:
            raise ConfigError(
                f"a cost table starts with a context >= 0 and a cost > 0: {table[:1]}"
            )
        for (low, cheap), (high, expensive) in pairwise(table):
            if not (low < high and cheap <= expensive < math.inf):
                raise ConfigError(
                    f"a cost table ascends: ({low}, {cheap}) comes before ({high}, {expensive})"
                )

    @classmethod
    def default(cls, model: ModelShape) -> Cost:
        """Return `1 + context / 10 700`: attention costs as much as the rest at 10 700 tokens.

        The ratio is from the Pensieve paper (Section 4.3.1), measured on A100s.

        Args:
            model: the model, for `ns_per_token`, see `ns_of`.
        """
        return cls(ns_per_token=cls.ns_of(model))

    @classmethod
    def seed(cls) -> Cost:
        """Return the constants of kvtrie's specification: alpha .001, beta .01, constant .005."""
        return cls(alpha=0.001, beta=0.01, constant=0.005)

    @staticmethod
    def ns_of(model: ModelShape) -> float:
        """Estimate the nanoseconds to prefill a token without context.

        The estimate is `2 * parameters / 100 TFLOP/s` with `parameters = 12 * layers * hidden**2`
        (4 hidden**2 of attention and 8 of the MLP per layer): two operations per parameter and
        token on a device reaching 100 TFLOP/s. It is 10 000 ns if `hidden` is unknown.
        """
        if model.hidden is None:
            return _UNKNOWN_NS
        return 2 * 12 * model.layers * model.hidden**2 / _FLOPS * 1e9
