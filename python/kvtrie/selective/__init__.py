"""Selective caches: a fixed number of rows per layer and head, chosen by a policy.

```text
generate --> model --> passes --> steps      a model with checks before each pass
               +--> attention, layers --> continuation, park
               +--> decoder_caches --> names --> policies, small, window, mix, coded, foreign
policies, small, mix --> attn_weights --> buffered --> buffers, cache      a class per kind of rows
coded, foreign --> quantiser
```

Invariant: a selective cache is the state of a single request. No plain scope of the trie matches
it.
Cost: memory does not grow with the sequence.
"""

from kvtrie.selective.attn_weights import AttnWeightsKVCache, Rows
from kvtrie.selective.buffered import KVCacheWithBuffers
from kvtrie.selective.buffers import KVCacheBuffers
from kvtrie.selective.cache import DefaultKVCache, KVCache
from kvtrie.selective.generate import generate
from kvtrie.selective.model import Parked, SelectiveCache
from kvtrie.selective.names import make_cache, register
from kvtrie.selective.quantiser import Codes, dequantise, quantise
from kvtrie.selective.replay import AttnWeightsReplayLog
from kvtrie.selective.settings import CacheSettings

__all__ = [
    "AttnWeightsKVCache",
    "AttnWeightsReplayLog",
    "CacheSettings",
    "Codes",
    "DefaultKVCache",
    "KVCache",
    "KVCacheBuffers",
    "KVCacheWithBuffers",
    "Parked",
    "Rows",
    "SelectiveCache",
    "dequantise",
    "generate",
    "make_cache",
    "quantise",
    "register",
]
