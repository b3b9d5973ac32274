# Written by tests/served/stubs.py out of the installed package: do not edit.

from dataclasses import dataclass
from typing import Any

@dataclass(init=False)
class KVConnectorOutput:
    kv_connector_worker_meta: object | None
