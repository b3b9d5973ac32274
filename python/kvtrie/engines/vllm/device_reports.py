"""DeviceReports: news of copies that a device has been given and may not have carried out yet.

Invariant: a report is returned once, and only when its event has passed; of one stream in order.
Nothing waits for a device that computes. Cost: a query per batch of reports that waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvtrie.transfer.report import MoveReport

__all__ = ["DeviceReports"]


class DeviceReports:
    """Reports that wait for copies of a device."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.cuda.Event | None, list[MoveReport]]] = []

    def add(self, reports: list[MoveReport], event: torch.cuda.Event | None) -> None:
        """Return these reports once the event has passed; None is one that has."""
        if reports:
            self._waiting.append((event, reports))

    def take(self, *, wait: bool = False) -> list[MoveReport]:
        """Return the reports whose copies are done.

        Args:
            wait: until all may be.
        """
        done: list[MoveReport] = []
        left: list[tuple[torch.cuda.Event | None, list[MoveReport]]] = []
        for event, reports in self._waiting:
            if event is not None and wait:
                event.synchronize()
            if event is None or wait or event.query():
                done += reports
            else:
                left.append((event, reports))
        self._waiting = left
        return done
