"""Warn of a version of vLLM that kvtrie is not tested with: names it lacks, signatures it changed.

Invariant: a tested version costs a comparison. Cost of another one: an import of all modules that
`surface` lists, once per process.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from kvtrie.engines.vllm.surface import VERSIONS, missing_names, refused_signatures
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
    missing, refused = sorted(missing_names()), refused_signatures()
    if not missing and not refused:
        _LOG.warning("kvtrie: %s; it has all names and signatures that kvtrie uses", tested)
        return getattr(import_module(module), name)
    parts: list[str] = []
    if missing:
        parts.append(f"it lacks {len(missing)} names that kvtrie uses: {', '.join(missing)}")
    if refused:
        each = ", ".join(f"{name} {why}" for name, why in sorted(refused.items()))
        parts.append(f"it has {len(refused)} signatures that kvtrie does not fit: {each}")
    lacks = "; ".join(parts)
    _LOG.warning("kvtrie: %s; %s", tested, lacks)
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{tested}; {lacks}") from error
