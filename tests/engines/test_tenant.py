"""Tenants that a front end signs: only its own names count."""

from __future__ import annotations

import pytest

from kvtrie.engines.server.tenant import (
    LONGEST_TENANT,
    extra_key_of,
    salt_of,
    signed,
    tenant_of,
    tenant_of_key,
)
from kvtrie.errors import ConfigError

SECRET = b"of the deployment"


def test_a_signed_name_is_the_tenant():
    params = {"kvtrie": {**signed("acme", SECRET), "session": "s"}}
    assert tenant_of(params, SECRET) == b"acme"


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        {"kvtrie": "acme"},
        {"kvtrie": {"tenant": "acme"}},
        {"kvtrie": {"tenant": "acme", "tenant_mac": ""}},
        {"kvtrie": {"tenant": "acme", "tenant_mac": "\ud800"}},
        {"kvtrie": {"tenant": "\ud800", "tenant_mac": "00"}},
        {"kvtrie": {"tenant": "", "tenant_mac": "00"}},
        {"kvtrie": {"tenant": b"acme", "tenant_mac": "00"}},
        {"kvtrie": {**signed("acme", SECRET), "tenant": "acme2"}},
        {"kvtrie": signed("acme", b"another")},
        {"kvtrie": {"tenant": "acme", "tenant_mac": salt_of("acme", SECRET)}},
    ],
)
def test_any_other_name_is_none(params):
    assert tenant_of(params, SECRET) is None


def test_salts_of_tenants_differ():
    assert salt_of("a", SECRET) != salt_of("b", SECRET)
    assert salt_of("a", SECRET) != salt_of("a", b"another")


@pytest.mark.parametrize(
    ("tenant", "secret", "said"),
    [
        ("", SECRET, "has 0 bytes, 1 to 256"),
        ("é" * LONGEST_TENANT, SECRET, "has 512 bytes"),
        ("a", b"", "is empty"),
        (3, SECRET, "tenant"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tenant, secret, said):
    with pytest.raises(ConfigError, match=said):
        signed(tenant, secret)


@pytest.mark.parametrize("name", ["acme", "é 3 x", "1 2"])
def test_an_extra_key_names_a_tenant_and_what_follows(name):
    key = extra_key_of(name, SECRET)
    assert tenant_of_key(key + "an adapter", SECRET) == (name.encode(), "an adapter")
    assert tenant_of_key(key, b"another") is None
    assert tenant_of_key("x" + key, SECRET) is None
    assert tenant_of_key(key.replace(name, "x" * len(name)), SECRET) is None
    assert tenant_of_key(name, SECRET) is None
