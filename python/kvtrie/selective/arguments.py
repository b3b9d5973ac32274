"""CacheArguments: arguments of policies in addition to the number of rows.

Invariant: an argument missing in a policy is refused, for any value. Cost: none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import flag, put, real, whole

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

__all__ = ["CacheArguments"]

log = logging.getLogger(__name__)

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CacheArguments:
    """Arguments of policies.

    Attributes:
        grace_period: number of newest tokens protected from eviction.
        max_chunk_size: most tokens of a step after the first. None sets no limit.
        keep_initial_fraction: share of the rows, from the start, spared by the first eviction if a
            prefill filled the cache without scoring.
        normalize_scores: divide a score by the number of positions since the token entered.
        prefill_scores: score the first step by the weights of this number of its last queries. 0
            disables it.
        sinks: number of first tokens of each sequence, never evicted.
        init_grace_tokens: alias of `sinks` for the policy `lastrec`.
        decay: factor of all scores per new token.
        seed: seed of random choices.
        given: names of the arguments passed by the user.

    Raises:
        ConfigError: a number out of range.
    """

    grace_period: int = 0
    max_chunk_size: int | None = None
    keep_initial_fraction: float = 0.05
    normalize_scores: bool = False
    prefill_scores: int | None = None
    sinks: int = 0
    init_grace_tokens: int = 0
    decay: float = 0.999
    seed: int = 0
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, low in (
            ("grace_period", 0),
            ("sinks", 0),
            ("init_grace_tokens", 0),
            ("seed", 0),
        ):
            put(self, **{name: whole(name, getattr(self, name), low, _MOST)})
        for name, low in (("max_chunk_size", 1), ("prefill_scores", 0)):
            if getattr(self, name) is not None:
                put(self, **{name: whole(name, getattr(self, name), low, _MOST)})
        put(
            self,
            keep_initial_fraction=real(
                "keep_initial_fraction", self.keep_initial_fraction, 0.0, 1.0
            ),
            decay=real("decay", self.decay, 0.0, 1.0),
            normalize_scores=flag("normalize_scores", self.normalize_scores),
        )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the arguments from a mapping by name.

        Raises:
            ConfigError: a name unknown to all policies, or a number out of range.
        """
        names = {each.name for each in fields(cls)} - {"given"}
        if unknown := sorted(set(given) - names):
            raise ConfigError(
                f"no policy takes {', '.join(unknown)}; known are {', '.join(sorted(names))}"
            )
        return cls(**given, given=frozenset(given))

    def check(self, accepts: Collection[str], policy: str, cache_length: int) -> None:
        """Check the arguments for a policy and a number of rows.

        Raises:
            ConfigError: an argument missing in the policy, or too many protected rows.
        """
        if lacking := sorted(self.given - set(accepts)):
            allowed = f"it takes {', '.join(sorted(accepts))}" if accepts else "it takes none"
            raise ConfigError(f"{policy} has no argument {', '.join(lacking)}: {allowed}")
        fixed = self.grace_period + max(self.sinks, self.init_grace_tokens)
        if fixed >= cache_length:
            raise ConfigError(
                f"a grace period of {self.grace_period} and "
                f"{max(self.sinks, self.init_grace_tokens)} sinks leave no row of {cache_length} "
                "to evict"
            )

    def note(self, cache_length: int) -> None:
        """Log arguments without effect for a number of rows."""
        if self.max_chunk_size is not None and self.max_chunk_size > cache_length // 2:
            log.info(
                "max_chunk_size %d brings no gain with %d rows: up to %d does",
                self.max_chunk_size,
                cache_length,
                cache_length // 2,
            )
