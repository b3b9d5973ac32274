"""Several machines behind a router: what other services know of the blocks of each one.

Engines publish events; an index service knows from them which machine has which blocks, and a
selection service also chooses the machine of a request. kvtrie asks such services and runs none:
see `docs/cluster.md`.

Invariant: importing this package loads neither torch nor a client library.
"""

from __future__ import annotations

from kvtrie.cluster.dynamo_index import DynamoIndex
from kvtrie.cluster.dynamo_selector import DynamoSelector, SelectorStats
from kvtrie.cluster.index import Held, Index, open_index
from kvtrie.cluster.locality_rule import locality
from kvtrie.cluster.selector import Selector, open_selector
from kvtrie.cluster.service import ServiceStats

__all__ = [
    "DynamoIndex",
    "DynamoSelector",
    "Held",
    "Index",
    "Selector",
    "SelectorStats",
    "ServiceStats",
    "locality",
    "open_index",
    "open_selector",
]
