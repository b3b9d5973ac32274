"""DeviceReports: news of copies that a device has been given and may not have carried out yet.

Invariant: a report is returned once, in order, and only when every copy that the device was given
before it is done; nothing waits for a device that computes. Cost: an event per batch of reports, on
a GPU; nothing elsewhere, where a copy is done when its call returns.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvtrie.transfer.report import MoveReport

__all__ = ["DeviceReports"]


class DeviceReports:
    """Reports that wait for copies of a device.

    Args:
        device: where the copies run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._waiting: deque[tuple[torch.cuda.Event | None, list[MoveReport]]] = deque()

    def add(self, reports: list[MoveReport]) -> None:
        """Return these reports once the work submitted to the device so far is done."""
        if reports:
            self._waiting.append((self._event(), reports))

    def take(self, *, wait: bool = False) -> list[MoveReport]:
        """Return the reports whose copies are done.

        Args:
            wait: until all may be.
        """
        done: list[MoveReport] = []
        while self._waiting:
            event, reports = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            done += reports
            self._waiting.popleft()
        return done

    def _event(self) -> torch.cuda.Event | None:
        if self._device is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
