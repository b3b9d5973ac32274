"""Operations on paged KV in place: gather, scatter, rotate to other positions, recompute.

```text
verbs --> call --> launch --> cubin      which device; launches of what `cuda/` compiled to
  +--> twin, pages                       the same in torch
attention --> flash --> launch           attention_backward --> flash_backward
rows, int4, rope, padding, ordered, terms: one operation each
checks --> formats
```

`attend` is attention to rows in any order, with the weights that each row was given. Each of the
others takes one layer of a pool (`Pages`) and a slot per token. On a CUDA device it runs a kernel
of `cuda/`, compiled at first use; on the CPU it runs the torch twin that says what the kernel
means.
Invariant: what is wrong is refused before anything is written. Cost: on a device a launch per
plane (K, V), without waiting for the device.
"""

from kvtrie.kernels.attention import (
    attend,
    attend_causal,
    attend_masked,
    attend_padded,
    attend_unweighed,
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
    "attend_unweighed",
    "compiled",
    "copy_rows",
    "gather",
    "pack",
    "recompute",
    "rerotate",
    "scatter",
    "unpack",
]
