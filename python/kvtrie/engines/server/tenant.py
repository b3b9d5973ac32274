"""Tenant: the name of a client's account in a request, signed by the operator's front end.

Engines pass a client's fields on, so a client could name any tenant, and invent accounts. A name
counts only with its HMAC-SHA256 under a secret that the front end and the server have. Invariant: a
name that is not signed is no tenant. Cost: one hash per request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import cast

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import text

__all__ = ["LONGEST_TENANT", "salt_of", "signed", "tenant_of"]

LONGEST_TENANT = 256
"""Bytes of the longest name of a tenant."""


def signed(tenant: str, secret: bytes) -> dict[str, str]:
    """Return the fields of `kv_transfer_params["kvtrie"]` that name a tenant.

    Args:
        tenant: the account, 1 to 256 bytes of UTF-8.
        secret: the content of the server's `secret_file`, as `read_secret` returns it.

    Raises:
        ConfigError: an empty or too long name, lone surrogates, an empty secret.
    """
    return {"tenant": tenant, "tenant_mac": _mac("tenant", tenant, secret)}


def salt_of(tenant: str, secret: bytes) -> str:
    """Return the `cache_salt` of a tenant, which keeps its blocks apart in the engine's own cache.

    Raises:
        ConfigError: as `signed`.
    """
    return _mac("salt", tenant, secret)


def tenant_of(params: object, secret: bytes) -> bytes | None:
    """Return the tenant of a request; None where none is signed.

    Args:
        params: the request's `kv_transfer_params`, of any type.
        secret: the secret that `signed` had.
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


def _mac(what: str, tenant: str, secret: bytes) -> str:
    name = text("tenant", tenant).encode()
    if not 1 <= len(name) <= LONGEST_TENANT:
        raise ConfigError(f"a tenant's name has {len(name)} bytes, 1 to {LONGEST_TENANT} wanted")
    if not secret:
        raise ConfigError("the secret that signs tenants is empty")
    return hmac.new(secret, f"kvtrie {what}\0".encode() + name, hashlib.sha256).hexdigest()
