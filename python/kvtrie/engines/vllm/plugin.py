"""The plug-in: makes the name `KvtrieConnector` known to vLLM.

The entry point `vllm.general_plugins` calls `register` in every process of a server, and more than
once. Invariant: it imports nothing but vLLM's table of connectors, and doing it again changes
nothing. Cost: a dictionary entry.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["register"]

_NAME = "KvtrieConnector"


def register() -> None:
    """Enter the connector, by the path of its module, unless it is known already."""
    table = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    try:
        table.register_connector(_NAME, "kvtrie.engines.vllm.connector", _NAME)
    except ValueError as error:  # how vLLM says that the name is there
        if "already registered" not in str(error):
            raise
