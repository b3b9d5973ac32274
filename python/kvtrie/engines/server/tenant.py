"""Tenant: the name of a client's account in a request, signed by the operator's front end.

Engines forward the fields of a client, so a client could name any tenant and invent accounts. A
name counts only with its HMAC-SHA256, under a secret shared by the front end and the server.
Invariant: an unsigned name is no tenant. Cost: one hash per request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import text, whole
from kvtrie.settings.scope import MOST_PRODUCERS
from kvtrie.tiers.remote.open import read_secret

__all__ = [
    "LONGEST_TENANT",
    "Sharing",
    "SharingSettings",
    "extra_key_of",
    "salt_of",
    "signed",
    "tenant_of",
    "tenant_of_key",
]

LONGEST_TENANT = 256
"""Bytes of the longest name of a tenant."""

_KEY = re.compile(r"kvtrie-tenant ([0-9a-f]{64}) (\d{1,3}) ", re.ASCII)


class Sharing(NamedTuple):
    """How a server shares blocks between tenants.

    Attributes:
        after: number of tenants computing a block before all tenants find it.
        secret: signs tenants, and keys the hashes of a block's producers.
    """

    after: int
    secret: bytes

    @classmethod
    def read(cls, share_after: object, secret_file: str | None) -> Sharing | None:
        """Read the two settings. Return None if both are missing.

        Raises:
            ConfigError: `share_after` is below 2 or above 32, only one setting is given, or the
                secret cannot be read.
        """
        if share_after is None:
            if secret_file is not None:
                raise ConfigError("secret_file is given without share_after, which it is for")
            return None
        after = whole("share_after", share_after, 2, MOST_PRODUCERS)
        secret = read_secret(secret_file)
        if secret is None:
            raise ConfigError(
                f"share_after is {after} without secret_file: the front end signs tenants with it"
            )
        return cls(after, secret)


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """Settings for sharing blocks among tenants.

    Attributes:
        share_after: number of tenants computing a block before it is shared among tenants. None
            shares by `cache_salt` alone.
        secret_file: a file with the secret used by the front end to sign tenants.
        tenant_header: the request header with the tenant, read by the middleware `AgentHints`. The
            front end must set or remove it.
    """

    share_after: int | None = None
    secret_file: str | None = None
    tenant_header: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SharingSettings:
        """Check the given settings.

        Raises:
            ConfigError: as `Sharing.read`, or the header is no text or without `share_after`.
        """
        settings = cls(**given)
        sharing, header = settings.open(), settings.tenant_header
        if header is not None:
            if not text("tenant_header", header):
                raise ConfigError("tenant_header is empty")
            if sharing is None:
                raise ConfigError(
                    f"tenant_header is {header!r} without share_after, which it is for"
                )
        return settings

    def open(self) -> Sharing | None:
        """Read the secret. Return None if tenants do not share."""
        return Sharing.read(self.share_after, self.secret_file)


def signed(tenant: str, secret: bytes) -> dict[str, str]:
    """Return the fields of `kv_transfer_params["kvtrie"]` for a tenant.

    Args:
        tenant: the account, 1 to 256 bytes of UTF-8.
        secret: the content of the server's `secret_file`, as returned by `read_secret`.

    Raises:
        ConfigError: an empty or too long name, lone surrogates, an empty secret.
    """
    return {"tenant": tenant, "tenant_mac": _mac("tenant", tenant, secret)}


def salt_of(tenant: str, secret: bytes) -> str:
    """Return the `cache_salt` of a tenant, to separate its blocks in the engine's own cache.

    Raises:
        ConfigError: as `signed`.
    """
    return _mac("salt", tenant, secret)


def tenant_of(params: object, secret: bytes) -> bytes | None:
    """Return the tenant of a request, None without a signed tenant.

    Args:
        params: the request's `kv_transfer_params`, of any type.
        secret: the secret used with `signed`.
    """
    if not isinstance(params, Mapping):
        return None
    given = cast("Mapping[str, object]", params).get("kvtrie")
    if not isinstance(given, Mapping):
        return None
    fields = cast("Mapping[str, object]", given)
    tenant, mac = fields.get("tenant"), fields.get("tenant_mac")
    if not isinstance(tenant, str) or not isinstance(mac, str):
        return None
    try:
        wanted = _mac("tenant", tenant, secret)
    except ConfigError:
        return None
    same = hmac.compare_digest(wanted.encode(), mac.encode(errors="replace"))
    return tenant.encode() if same else None


def extra_key_of(tenant: str, secret: bytes) -> str:
    """Return the `extra_key` of SGLang's requests for a tenant.

    Raises:
        ConfigError: as `signed`.
    """
    return f"kvtrie-tenant {_mac('tenant', tenant, secret)} {len(tenant)} {tenant}"


def tenant_of_key(extra_key: str, secret: bytes) -> tuple[bytes, str] | None:
    """Return the tenant of an `extra_key` and the rest of it, None without a signed tenant."""
    head = _KEY.match(extra_key)
    if head is None:
        return None
    end = head.end() + int(head[2])
    tenant, rest = extra_key[head.end() : end], extra_key[end:]
    found = tenant_of({"kvtrie": {"tenant": tenant, "tenant_mac": head[1]}}, secret)
    return None if found is None else (found, rest)


def _mac(what: str, tenant: str, secret: bytes) -> str:
    name = text("tenant", tenant).encode()
    if not 1 <= len(name) <= LONGEST_TENANT:
        raise ConfigError(f"a tenant's name has {len(name)} bytes, 1 to {LONGEST_TENANT} wanted")
    if not secret:
        raise ConfigError("the secret that signs tenants is empty")
    return hmac.new(secret, f"kvtrie {what}\0".encode() + name, hashlib.sha256).hexdigest()
