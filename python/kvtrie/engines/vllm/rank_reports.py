"""RankReports: unsent reports of a rank, and the requests waiting for their loads.

Invariant: a request is received once all of its loads are finished. Cost: a step per report while
any request waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtrie.transfer.report import MoveReport

__all__ = ["RankReports"]


class RankReports:
    """The reports of a rank."""

    def __init__(self) -> None:
        self._reports: list[MoveReport] = []
        self._receiving: dict[int, str] = {}  # waiting requests by load
        self._received, self._failed = set[str](), set[str]()

    def expect(self, loads: Mapping[str, Iterable[int]], unreceived: set[str]) -> None:
        """Record the loads of waiting requests, and the requests without the promised loads."""
        for request, ids in loads.items():
            self._receiving |= dict.fromkeys(ids, request)
        self._received |= unreceived
        self._failed |= unreceived

    def fail(self, request: str) -> None:
        """Make a waiting request fail, even if its loads succeed."""
        if request in self._receiving.values():
            self._failed.add(request)

    def add(self, reports: list[MoveReport]) -> None:
        """Add reports, and update the requests waiting for these loads."""
        self._reports += reports
        for report in reports if self._receiving else ():
            ended = {self._receiving.pop(each) for each in report.ids if each in self._receiving}
            self._received |= ended
            self._failed |= ended if not report.ok else set()

    def received(self) -> tuple[set[str], set[str]]:
        """Return the requests with all loads finished since the last call, and the failures."""
        ended = self._received.difference(self._receiving.values())
        failed, self._failed = self._failed & ended, self._failed - ended
        self._received -= ended
        return ended, failed

    def take(self) -> list[MoveReport]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports
