"""Use kvtrie with transformers: `open` adds tiers to a model and makes caches for `generate`.

```text
opening --> open_model
     |
   cache                                          decoder (fusion) --> fused_cache, summed_weights
     |
     +--> admission --> cache_misses     leases of the prompts, and causes of misses
     +--> passes --> layer_trial, trial --> guard, rope      a model, and checks of its passes
     +--> batch                          state of all rows
            +--> rows --> step           leases, and the addresses of a pass
            +--> parts --> windows, states --> group_blocks     groups of layers after the first
            +--> arrival                 loads by layer during the first pass
            +--> recovery --> mask       recomputation of missing tokens
```

Invariant: a model gives the same tokens with and without a kvtrie cache.
"""

from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.engines.transformers.cache import KvtrieCache
from kvtrie.engines.transformers.decoder import Decoder
from kvtrie.engines.transformers.layer_trial import model_shape
from kvtrie.engines.transformers.open_model import OpenModel
from kvtrie.engines.transformers.opening import open  # noqa: A004 - read as `transformers.open`

__all__ = [
    "Decoder",
    "KvtrieCache",
    "OpenModel",
    "fingerprint",
    "model_shape",
    "open",
]
