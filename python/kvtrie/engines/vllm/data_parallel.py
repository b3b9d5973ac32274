"""A data-parallel rank's own part of a disk or of kept memory, in a vLLM server.

vLLM runs the ranks of a dense model as independent engines and reports their number only to the
first process. With several ranks, it ends the engine's id with the rank.
Cost: a regular expression on a short text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

__all__ = ["part_of"]

_RANK = re.compile(r"_dp\d+\Z")


def part_of(engine: str | None, parallel: ParallelConfig | None = None) -> str:
    """Return the name of a rank's part, for example "dp-0", or "" with a single rank.

    Args:
        engine: vLLM's id of the engine.
        parallel: the configuration, for a data-parallel engine in an offline program.
    """
    if found := _RANK.search(engine or ""):
        return f"dp-{found[0].removeprefix('_dp')}"
    if parallel is not None and parallel.data_parallel_size > 1:
        return f"dp-{parallel.data_parallel_index}"
    return ""
