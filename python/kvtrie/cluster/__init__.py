"""Several machines behind a router: what other services know of the blocks of each one.

Engines publish events; an index service knows from them which machine has which blocks, and a
selection service also chooses the machine of a request. kvtrie asks such services and runs none:
see `docs/cluster.md`.

Invariant: importing this package loads neither torch nor a client library.
"""

from __future__ import annotations

from kvtrie.cluster.locality_rule import locality

__all__ = ["locality"]
