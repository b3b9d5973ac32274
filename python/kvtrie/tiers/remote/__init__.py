"""The `remote` tier: blocks in a store that several processes and machines share.

`Tier("remote", blocks=…, path=URL)` with a URL of `folder:` opens one; see
`docs/remote.md`. kvtrie names and verifies the blocks; the store only keeps bytes.

```text
storage --> client, keyed --> values, beliefs, search        blocks: names, headers, what is there
   |           +--> guarded --> breaker, counts              a store that fails or hangs
   +--> form   +--> open --> folder, redis, object, mooncake, each over protocol and url
redis --> redis_nodes --> resp      object --> bucket      check: for `kvtrie remote check`
```

Invariant: a block is returned as it was written, or it is a miss with a counted reason.
"""

from __future__ import annotations

from kvtrie.tiers.remote.counts import RemoteStats
from kvtrie.tiers.remote.open import schemes
from kvtrie.tiers.remote.protocol import OUTCOMES, Get, Outcome, Put, RemoteStore, Result
from kvtrie.tiers.remote.search import Found
from kvtrie.tiers.remote.storage import RemoteStorage
from kvtrie.tiers.remote.url import RemoteUrl

__all__ = [
    "OUTCOMES",
    "Found",
    "Get",
    "Outcome",
    "Put",
    "RemoteStats",
    "RemoteStorage",
    "RemoteStore",
    "RemoteUrl",
    "Result",
    "schemes",
]
