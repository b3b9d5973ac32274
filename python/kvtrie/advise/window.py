"""Window: the requests for an advice, from a server, a recording or a trace.

Invariant: listening and reading its recording give the same window. Cost: the cost of rebuilding
the requests, see `kvtrie.advise.rebuild`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtrie.advise.groups import PublishedGroups, refuse_without_requests
from kvtrie.advise.rebuild import Rebuilt
from kvtrie.advise.server_metrics import traffic_of
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie.advise.groups import Grouping
    from kvtrie.advise.server_metrics import Traffic
    from kvtrie.advise.wire import Batch

__all__ = ["Window"]

_NS = 1_000_000_000


@dataclass(slots=True)
class Window:
    """Events and counters of a server.

    Attributes:
        rebuilt: its requests.
        before: counters at the begin of listening, after the history.
        after: the latest counters.
        listened: seconds of the first batch after `before`, or None.
        groups: all groups of layers except the requests' group.
    """

    rebuilt: Rebuilt = field(default_factory=Rebuilt)
    before: dict[str, float] | None = None
    after: dict[str, float] | None = None
    listened: float | None = None
    groups: PublishedGroups = field(default_factory=PublishedGroups)

    def add(self, one: Batch | dict[str, float]) -> None:
        """Add a batch of events, or counters.

        Raises:
            ConfigError: as `Rebuilt.add` and `PublishedGroups.add`.
        """
        if isinstance(one, dict):
            if self.before is None:
                self.before = one
            self.after = one
            return
        if self.before is not None and self.listened is None:
            self.listened = one.at
        self.rebuilt.add(one)
        self.groups.add(one, self.rebuilt.blocks_on_gpu)

    def add_all(self, rows: Iterable[Batch | dict[str, float]]) -> None:
        """Add a recording.

        Raises:
            ConfigError: as `Rebuilt.add`, or no event.
        """
        for row in rows:
            self.add(row)
        self.check()

    def check(self) -> None:
        """Refuse a window without requests.

        Raises:
            ConfigError: no block was stored, or only blocks of groups without full attention.
        """
        if not len(self.rebuilt):
            refuse_without_requests(self.groups)
            raise ConfigError(
                "no block was stored in the window: the server had no requests, or prefix caching "
                "is off there"
            )

    def traffic(self) -> Traffic | None:
        """Return the server's work while listening, or None without metrics.

        Raises:
            ConfigError: as `traffic_of`.
        """
        if self.before is None or self.after is None:
            return None
        return traffic_of(self.before, self.after)

    def coverage(self, traffic: Traffic | None) -> float:
        """Return the tokens of rebuilt prompts per token of all prompts, at most 1.

        Requests found completely in the GPU's memory store no block and are not rebuilt.
        """
        if traffic is None or self.listened is None or self.rebuilt.first is None:
            return 1.0
        since = round((self.listened - self.rebuilt.first) * _NS)
        rebuilt = sum(
            request.input_tokens for request in self.rebuilt.requests() if request.at >= since
        )
        return min(1.0, rebuilt / traffic.prompt_tokens)

    def knows_gpu(self) -> bool:
        """Return whether the metrics have the size of the engine's cache."""
        return bool({"num_gpu_blocks", "gpu_tokens"} & set(self.after or {}))

    def gpu_bytes(self, grouping: Grouping) -> int | None:
        """Return the bytes of the engine's cache for full blocks, by its metrics.

        None if the metrics lack the size.
        """
        counters, size = self.after or {}, self.rebuilt.size
        block = grouping.page or grouping.model.block_bytes(max(1, size))
        if "num_gpu_blocks" in counters:
            # vLLM keeps a block for padding, and the partial block of a running request takes a
            # block of each group.
            return (int(counters["num_gpu_blocks"]) - 2 - len(grouping.groups)) * block
        if "gpu_tokens" in counters and size:
            return int(counters["gpu_tokens"]) // size * block
        return None

    def resident_bytes(self, grouping: Grouping) -> int:
        """Return the maximum bytes in the GPU's memory at a time, according to the events."""
        if grouping.page:
            return self.groups.resident * grouping.page
        return self.rebuilt.resident * grouping.model.block_bytes(max(1, self.rebuilt.size))
