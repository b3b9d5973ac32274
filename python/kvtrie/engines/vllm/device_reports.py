"""DeviceReports: reports of copies queued on a device, held back until the copies are done.

Invariant: a report is returned once, and only after its event. Reports of a stream stay in order.
Nothing waits for a computing device. Cost: an event query per waiting batch of reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvtrie.transfer.report import MoveReport

__all__ = ["DeviceReports"]


class DeviceReports:
    """Reports of copies in flight on a device."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.cuda.Event | None, list[MoveReport]]] = []

    def add(self, reports: list[MoveReport], event: torch.cuda.Event | None) -> None:
        """Add reports to return after the event, or at once if it is None."""
        if reports:
            self._waiting.append((event, reports))

    def take(self, *, wait: bool = False) -> list[MoveReport]:
        """Return the reports with finished copies.

        Args:
            wait: wait for all copies.
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
