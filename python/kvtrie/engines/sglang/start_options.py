"""Digest of an SGLang server's start options, except options that cannot change KV.

It covers the fields of the server's arguments, the environment variables of SGLang, the versions of
libraries with kernels, and the kind of the device. `excluded` lists the omitted options.
Invariant: equal options give the same digest in every process. Options not listed change it.
Cost: some milliseconds.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch

from kvtrie.engines.identity.canonical import Encoding
from kvtrie.engines.identity.start_options import device, digest_of, variables_of, versions
from kvtrie.engines.sglang.excluded import FIELDS, VARIABLES
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["environment", "options", "options_digest"]


def options_digest(arguments: object) -> bytes:
    """Return a digest of 32 bytes over all server options that can change KV.

    Args:
        arguments: SGLang's `ServerArgs`, None in a process without a server.

    Raises:
        ConfigError: an option has no canonical encoding, or lets clients name content.
    """
    if getattr(arguments, "trust_mm_content_hashes", False):
        raise ConfigError(
            "trust_mm_content_hashes is set: clients name the content of their media, so stored "
            "KV could be that of another picture; start SGLang without it"
        )
    parts = {
        "server_args": options(arguments),
        "environment": environment(os.environ),
        "versions": versions(),
        "device": device("cuda" if torch.cuda.is_available() else "cpu"),
    }
    return digest_of(parts, Encoding())


def options(arguments: object) -> dict[str, object]:
    """Return the fields of a server's arguments not excluded, as resolved by SGLang."""
    if arguments is None:
        return {}
    fields = cast("tuple[str, ...]", getattr(type(arguments), "__struct_fields__", ()))
    names = {*fields, *getattr(arguments, "__dict__", {})}
    left_out = {name for each in FIELDS.values() for name in each}
    # SGLang keeps the values given by a user and the resolved values separately.
    resolved = getattr(import_module("sglang.srt.arg_groups.overrides"), "resolution_result")  # noqa: B009
    return {name: resolved(arguments, name) for name in sorted(names - left_out)}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of SGLang, except excluded variables."""
    return variables_of(variables, lambda name: name.startswith(("SGLANG_", "SGL_")), VARIABLES)
