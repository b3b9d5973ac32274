"""The `remote` tier: blocks in a store shared by several processes and machines.

`Tier("remote", blocks=…, path=URL)` opens a store by its URL, as `folder:/path` (see
`docs/remote.md`). kvtrie names and verifies the blocks. The store only keeps bytes.

```text
storage --> client, keyed --> values, beliefs, search        blocks: names, headers, presence
   |           +--> guarded --> breaker, counts              a failing or hanging store
   +--> form   +--> open --> folder, redis, object, mooncake, each over protocol and url
redis --> redis_nodes --> resp      object --> bucket      check: for `kvtrie remote check`
```

Invariant: a block is returned as written, or it is a miss with a counted reason.
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
