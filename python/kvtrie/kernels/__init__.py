"""Operations on paged KV in place: gather, scatter, rotate to other positions, recompute.

```text
verbs --> call --> launch --> cubin      choice of device, launches of the kernels of `cuda/`
  +--> twin, pages                       the same in torch
attention --> flash --> launch           attention_backward --> flash_backward
rows, int4, rope, padding, ordered, terms: an operation each
checks --> formats
```

`attend` computes attention to rows in any order and the total weight of each row. The verbs take a
layer of a pool (`Pages`) and a slot per token. On a CUDA device an operation runs a kernel of
`cuda/`, compiled at first use. On the CPU it runs a twin: the reference implementation in torch.
Invariant: invalid arguments are refused before any write. Cost: on a device a launch per plane
(K, V), without waiting for the device.
"""

from kvtrie.kernels.attention import (
    attend,
    attend_causal,
    attend_masked,
    attend_padded,
    attend_without_weights,
)
from kvtrie.kernels.attention_backward import attend_backward
from kvtrie.kernels.cubin import ARCHS, compiled
from kvtrie.kernels.int4 import Packed, pack, unpack
from kvtrie.kernels.ordered import attend_ordered
from kvtrie.kernels.pages import Pages, Plane
from kvtrie.kernels.rope import Rope
from kvtrie.kernels.rows import copy_rows
from kvtrie.kernels.terms import Terms
from kvtrie.kernels.verbs import Recomputed, gather, recompute, rerotate, scatter

__all__ = [
    "ARCHS",
    "Packed",
    "Pages",
    "Plane",
    "Recomputed",
    "Rope",
    "Terms",
    "attend",
    "attend_backward",
    "attend_causal",
    "attend_masked",
    "attend_ordered",
    "attend_padded",
    "attend_without_weights",
    "compiled",
    "copy_rows",
    "gather",
    "pack",
    "recompute",
    "rerotate",
    "scatter",
    "unpack",
]
