"""Warn of a version of vLLM that kvtrie is not tested with, and list the names that it lacks.

Invariant: a tested version costs a comparison. Cost of another one: an import of all modules that
`surface` lists, once per process.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from kvtrie.engines.vllm.surface import VERSIONS, missing_names
from kvtrie.errors import ConfigError

__all__ = ["load_connector"]

_LOG = logging.getLogger("vllm.kvtrie")  # whose lines vLLM shows


def load_connector(module: str, name: str) -> Any:  # noqa: ANN401 - a class that vLLM's own base makes
    """Import the connector's class, after a warning if the version of vLLM is not a tested one.

    Args:
        module: the connector's module.
        name: the connector's class.

    Raises:
        ConfigError: vLLM lacks a name without which the connector cannot be imported.
    """
    version = str(import_module("vllm").__version__)
    if ".".join(version.split(".")[:2]) in VERSIONS:
        return getattr(import_module(module), name)
    tested = f"vLLM {version} is not one of the tested versions, {VERSIONS[0]} to {VERSIONS[-1]}"
    missing = sorted(missing_names())
    if not missing:
        _LOG.warning("kvtrie: %s; it has all names that kvtrie uses", tested)
        return getattr(import_module(module), name)
    lacks = f"it lacks {len(missing)} names that kvtrie uses: {', '.join(missing)}"
    _LOG.warning("kvtrie: %s; %s", tested, lacks)
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{tested}; {lacks}") from error
