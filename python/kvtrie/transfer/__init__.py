"""Carrying out what the manager decided: moves become copied bytes, and copies become completions.

Nothing here chooses a slot, a victim or an order; it only obeys, and reports.
"""

from kvtrie.transfer.dispatch import Dispatch
from kvtrie.transfer.executor import Executor
from kvtrie.transfer.layerwise import Layerwise, LayerwiseEngine, Request
from kvtrie.transfer.prefetch import Prefetched
from kvtrie.transfer.report import MoveReport
from kvtrie.transfer.runner import Runner

__all__ = [
    "Dispatch",
    "Executor",
    "Layerwise",
    "LayerwiseEngine",
    "MoveReport",
    "Prefetched",
    "Request",
    "Runner",
]
