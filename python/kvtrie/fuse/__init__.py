"""Fusion of chunks: pieces of text whose KV is computed once and reused at any position.

```text
fusor --> store --> fetch, lookup, placement, turns      chunks by content, on all tiers
  +--> gate --> prefill, rotation      checks of the model, full prefill, rotation of keys
  +--> select --> deviation      choice of the tokens to compute again
  +--> backing, memory, log, monitor
controller --> profile --> passes      how many tokens, from measured speeds
```
"""

from kvtrie.fuse.context import Chunk, Context
from kvtrie.fuse.controller import Controller
from kvtrie.fuse.deviation import DeviationProfile
from kvtrie.fuse.fetch import Fetch
from kvtrie.fuse.fusor import Fused, Fusor
from kvtrie.fuse.layers import DecoderLayers
from kvtrie.fuse.monitor import Monitor, Quality
from kvtrie.fuse.part import Part
from kvtrie.fuse.store import CacheStore

__all__ = [
    "CacheStore",
    "Chunk",
    "Context",
    "Controller",
    "DecoderLayers",
    "DeviationProfile",
    "Fetch",
    "Fused",
    "Fusor",
    "Monitor",
    "Part",
    "Quality",
]
