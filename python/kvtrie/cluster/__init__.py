"""Clusters: clients of services that know the blocks of several machines.

Engines publish events, with `Publisher` if they use a manager of kvtrie. An index service learns
the blocks of each machine from the events, and a selection service also chooses the machine of a
request. kvtrie calls these services and runs none: see `docs/cluster.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtrie.cluster.dynamo_index import DynamoIndex
from kvtrie.cluster.dynamo_selector import DynamoSelector
from kvtrie.cluster.index import Held, Index, open_index
from kvtrie.cluster.locality_rule import locality
from kvtrie.cluster.selection_calls import Load
from kvtrie.cluster.selector import Selector, open_selector
from kvtrie.cluster.selector_stats import SelectorStats
from kvtrie.cluster.service import ServiceStats

if TYPE_CHECKING:
    from kvtrie.cluster.publisher import MEDIUMS, Publisher, PublisherCounts

__all__ = [
    "MEDIUMS",
    "DynamoIndex",
    "DynamoSelector",
    "Held",
    "Index",
    "Load",
    "Publisher",
    "PublisherCounts",
    "Selector",
    "SelectorStats",
    "ServiceStats",
    "locality",
    "open_index",
    "open_selector",
]

_PUBLISHER = ("MEDIUMS", "Publisher", "PublisherCounts")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - it needs pyzmq
    """Import the publisher."""
    if name not in _PUBLISHER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvtrie.cluster import publisher
    except ImportError as error:
        raise ImportError("a publisher needs: pip install 'kvtrie[cluster]'") from error
    return getattr(publisher, name)
