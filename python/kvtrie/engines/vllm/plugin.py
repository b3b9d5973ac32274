"""The plug-in: registers kvtrie's classes in vLLM.

The entry point `vllm.general_plugins` calls `register` in every process of a server, and more than
once. Invariant: it imports only vLLM's registries, and repeated calls change nothing. A registry
missing in a version of vLLM is skipped. Cost: a dictionary entry per class.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["register"]

_OURS = "kvtrie.engines.vllm"
_TABLES = (
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.register_connector",
        ("KvtrieConnector", _OURS, "KvtrieConnector"),
    ),
    (
        "vllm.v1.kv_offload.cpu.policies.factory",
        "CachePolicyFactory.register_cache_policy",
        ("kvtrie", f"{_OURS}.cache_policy", "KvtrieCachePolicy"),
    ),
    (
        "vllm.v1.kv_offload.factory",
        "OffloadingSpecFactory.register_spec",
        ("KvtrieOffloadingSpec", f"{_OURS}.offloading", "KvtrieOffloadingSpec"),
    ),
    (
        "vllm.v1.kv_offload.tiering.factory",
        "SecondaryTierFactory.register_tier",
        ("kvtrie", f"{_OURS}.disk_tier", "KvtrieDiskTier"),
    ),
)


def register() -> None:
    """Register each class by the path of its module, unless it is registered already."""
    for at, (module, path, row) in enumerate(_TABLES):
        table, method = path.split(".")
        try:
            if at:  # vLLM before 0.31 has the registries, but incompatible classes
                import_module("vllm.v1.kv_hints")
            enter = getattr(getattr(import_module(module), table), method)
        except (ImportError, AttributeError):
            if not at:  # without connectors kvtrie cannot work
                raise
            continue
        try:
            enter(*row)
        except ValueError as error:  # vLLM's error for a registered name
            if "already registered" not in str(error):
                raise
