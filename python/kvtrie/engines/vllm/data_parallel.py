"""The part of a disk or of kept memory that a data-parallel rank of a vLLM server has for itself.

vLLM runs the ranks of a dense model as independent engines and hides their number from all but the
first process, but it ends the engine's id with the rank wherever there are several.
Cost: a look at the end of a text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

__all__ = ["part_of"]

_RANK = re.compile(r"_dp\d+\Z")


def part_of(engine: str | None, parallel: ParallelConfig | None = None) -> str:
    """Return the name of a rank's part, as "dp-0"; "" where there is one rank only.

    Args:
        engine: vLLM's id of the engine.
        parallel: the configuration, for an engine that an offline program starts as one of several.
    """
    if found := _RANK.search(engine or ""):
        return f"dp-{found[0].removeprefix('_dp')}"
    if parallel is not None and parallel.data_parallel_size > 1:
        return f"dp-{parallel.data_parallel_index}"
    return ""
