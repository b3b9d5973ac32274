"""kvtrie: a KV-cache block manager for any LLM inference engine.

Import the names below from here. Invariant: importing this package loads nothing heavier than its
extension module. numpy is loaded with the first array. Cost: some 25 ms.
"""

from __future__ import annotations

from kvtrie._kvtrie import (
    BlockManager,
    Committed,
    Copy,
    Event,
    Eviction,
    Explanation,
    Failed,
    GroupStats,
    HintReply,
    Histogram,
    Index,
    LaneStats,
    Lease,
    Match,
    MatchedBlock,
    Miss,
    MissBranch,
    Move,
    Moves,
    Plan,
    Span,
    Stats,
    TierStats,
    Transmission,
    Unpriced,
    __version__,
)
from kvtrie.errors import (
    ClosedError,
    ConfigError,
    InvariantError,
    KvtrieError,
    NoMachineError,
    NoSpaceError,
    TransferError,
)
from kvtrie.model.cost import Cost
from kvtrie.model.layer_group import LayerGroup
from kvtrie.model.layout import Layout
from kvtrie.model.shape import ModelShape
from kvtrie.settings.hint import Demote, Prefetch, Progress, Quota, Release, ResumeAt, Retain
from kvtrie.settings.resume import ResumePoints
from kvtrie.settings.scope import Scope
from kvtrie.settings.tier import Lane, Tier

__all__ = [
    "BlockManager",
    "ClosedError",
    "Committed",
    "ConfigError",
    "Copy",
    "Cost",
    "Demote",
    "Event",
    "Eviction",
    "Explanation",
    "Failed",
    "GroupStats",
    "HintReply",
    "Histogram",
    "Index",
    "InvariantError",
    "KvtrieError",
    "Lane",
    "LaneStats",
    "LayerGroup",
    "Layout",
    "Lease",
    "Match",
    "MatchedBlock",
    "Miss",
    "MissBranch",
    "ModelShape",
    "Move",
    "Moves",
    "NoMachineError",
    "NoSpaceError",
    "Plan",
    "Prefetch",
    "Progress",
    "Quota",
    "Release",
    "ResumeAt",
    "ResumePoints",
    "Retain",
    "Scope",
    "Span",
    "Stats",
    "Tier",
    "TierStats",
    "TransferError",
    "Transmission",
    "Unpriced",
    "__version__",
]
