"""Formats: the number formats of the kernels, and their names in CUDA.

Invariant: rows are in a format of models' computation, cells in any format. Cost: none.
"""

from __future__ import annotations

import torch

__all__ = ["CELLS", "LARGEST", "ROWS", "VECTOR_BYTES"]

ROWS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Formats of rows: outputs of projections and inputs of attention."""

CELLS = {**ROWS, torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
"""Formats of pools."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The value of a quantised format's largest code at scale 1."""

VECTOR_BYTES = 16
"""Bytes of a row read or written by a lane at a time."""
