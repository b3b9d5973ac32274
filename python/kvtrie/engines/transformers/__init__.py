"""Models of transformers: `open` for a model with its tiers, and the caches that `generate` takes.

```text
open_model --> opening --> layer_trial --> trial --> guard
     |
   cache <-- grouped_cache --> window_layer           decoder (fusion) --> fused_cache, weighing
     |
     +--> rows --> step          the rows of a batch, and what a pass of them computes
     +--> first_pass --> arrival      loads by layer during the first pass
     +--> row_recovery --> recovery --> mask          blocks that turned out damaged
     +--> rope, hook, guard      what a model must be for its KV to be found again
     +--> cache_misses           why tokens were computed
```

Invariant: with or without a cache of kvtrie a model gives the same tokens.
"""

from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.engines.transformers.cache import KvtrieCache
from kvtrie.engines.transformers.decoder import Decoder
from kvtrie.engines.transformers.grouped_cache import GroupedCache
from kvtrie.engines.transformers.layer_trial import model_shape
from kvtrie.engines.transformers.open_model import OpenModel, open  # noqa: A004 - read as `transformers.open`

__all__ = [
    "Decoder",
    "GroupedCache",
    "KvtrieCache",
    "OpenModel",
    "fingerprint",
    "model_shape",
    "open",
]
