"""Executes the manager's moves: copies the bytes and reports the completions.

```text
executor --> runner --> ledger --> schedule --> queue, budget      which job runs next
   |           |          +--> section, hung, addresses, remote_stores
   |           +--> carry --> job --> layer_copies, job_state      what a thread does
   |           +--> outbox --> report
   +--> claims, feedback, used_blocks, deadline_call, prefetch --> store_question
layerwise --> layer_loads, layer_stores --> stream, connector      copies during a pass
dispatch: one manager over several ranks      timed_copies: for profiles
```

The manager chooses slots, victims and order. This package only executes and reports.
"""

from kvtrie.transfer.dispatch import Dispatch
from kvtrie.transfer.executor import Executor
from kvtrie.transfer.layerwise import Layerwise, LayerwiseEngine, Request
from kvtrie.transfer.prefetch import Prefetched
from kvtrie.transfer.report import MoveReport
from kvtrie.transfer.runner import Runner

__all__ = [
    "Dispatch",
    "Executor",
    "Layerwise",
    "LayerwiseEngine",
    "MoveReport",
    "Prefetched",
    "Request",
    "Runner",
]
