"""Digest of all that an SGLang server was started with, except for options that cannot change KV.

It covers the server's arguments field by field, the environment variables of SGLang that are set,
the versions of libraries that ship kernels, and the kind of the device. `excluded` lists what is
left out.
Invariant: equal options have one digest in every process; an option that is not listed changes it.
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
    """Return 32 bytes that change with any option of a server that can change KV.

    Args:
        arguments: SGLang's `ServerArgs`; None in a process without a server.

    Raises:
        ConfigError: an option without a canonical encoding, or one that lets clients name content.
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
    """Return the fields of a server's arguments that are not excluded, as SGLang resolved them."""
    if arguments is None:
        return {}
    fields = cast("tuple[str, ...]", getattr(type(arguments), "__struct_fields__", ()))
    names = {*fields, *getattr(arguments, "__dict__", {})}
    left_out = {name for each in FIELDS.values() for name in each}
    # SGLang keeps what a user gave, and apart from it what it made of that.
    resolved = getattr(import_module("sglang.srt.arg_groups.overrides"), "resolution_result")  # noqa: B009
    return {name: resolved(arguments, name) for name in sorted(names - left_out)}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of SGLang that are set and not excluded."""
    return variables_of(variables, lambda name: name.startswith(("SGLANG_", "SGL_")), VARIABLES)
