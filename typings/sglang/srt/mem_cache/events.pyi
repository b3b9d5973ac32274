# Written by tests/served/stubs.py out of the installed package: do not edit.

from typing import Any

class KVCacheEventRecorder:
    enabled: bool
    def record_store(
        self,
        node: Any,
        medium: Any = ...,
        *,
        session_id: str | None = ...,
    ) -> None: ...
    def record_remove(self, node: Any, medium: Any = ...) -> None: ...
