# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class KvHintsEnvelope:
    actions: list[KvHintAction]

class KvHintAction:
    action_type: str
    action_version: str
    payload: dict[str, Any]
