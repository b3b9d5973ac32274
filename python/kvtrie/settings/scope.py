"""Scope: identity within which sequences share blocks.

Invariant: blocks of two scopes (two tenants or two adapters) never match, whatever their tokens.
Cost: a scope is looked up once per call, in O(log scopes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import pairs, put, salt, text, whole, word

__all__ = ["MOST_PRODUCERS", "Scope", "Structure"]

MOST_PRODUCERS = 32
"""Largest `share_after`."""

_MOST_DIGESTS = 2**16 - 1

Structure: TypeAlias = Literal["leaf-only", "holes"]


@dataclass(frozen=True, slots=True)
class Scope:
    """Identity required for sharing blocks between sequences, in addition to the model's.

    Attributes:
        tenant: salt of the tenant. Two tenants never share, unless both have `share_after`.
        lora: name of the adapter. Two adapters never share. The part before its first space is
            the version of the weights, used by `BlockManager.sort_versions` to drop blocks.
        extra: pairs of token offset and digest of an input at the token, for example an image.
            Sequences share everything before their first different digest.
        structure: "leaf-only" for engines with prefix reuse only, "holes" for engines that can
            recompute inside a sequence. None takes the manager's. Fixed at the scope's first use.
        share_after: number of tenants with `share_after` that must compute a block before all of
            them share it, 2 to 32. Until then only its producers find it. None shares nothing. The
            largest number seen by a manager counts.

    Raises:
        ConfigError: an unknown structure, a negative or repeated offset, an empty digest, or a
            `share_after` below 2 or above 32, or without a tenant.
    """

    tenant: bytes = b""
    lora: str = ""
    extra: tuple[tuple[int, bytes], ...] = ()
    structure: Structure | None = None
    share_after: int | None = None

    def __post_init__(self) -> None:
        put(
            self,
            tenant=salt("tenant", self.tenant),
            lora=text("lora", self.lora),
            extra=tuple(
                (whole("token of a digest", at, 0, 2**63 - 1), salt("a digest", digest))
                for at, digest in pairs("extra of a scope", self.extra, _MOST_DIGESTS)
            ),
        )
        if self.share_after is not None:
            put(self, share_after=whole("share_after", self.share_after, 2, MOST_PRODUCERS))
            if not self.tenant:
                raise ConfigError(f"share_after is {self.share_after} in a scope without a tenant")
        if self.structure is not None:
            word("structure", self.structure, ("leaf-only", "holes"))
        offsets = [at for at, _ in self.extra]
        for at, digest in self.extra:
            if not digest:
                raise ConfigError(f"the digest at token {at} is empty, at least a byte wanted")
        if len(set(offsets)) < len(offsets):
            raise ConfigError(f"two digests have one token: offsets {offsets}")
