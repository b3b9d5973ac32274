"""Models of transformers: `open` for a model with its tiers, and the caches that `generate` takes.

```text
opening --> open_model
     |
   cache                                              decoder (fusion) --> fused_cache, weighing
     |
     +--> admission --> cache_misses     leases of the prompts, and why tokens are computed
     +--> passes --> layer_trial, trial --> guard, rope      a model, and what its passes must be
     +--> batch                          the rows, and what they hold
            +--> rows --> step           leases, and what a pass of them computes
            +--> parts --> windows, states --> group_blocks     groups of layers after the first
            +--> arrival                 loads by layer during the first pass
            +--> recovery --> mask       blocks that turned out damaged
```

Invariant: with or without a cache of kvtrie a model gives the same tokens.
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
