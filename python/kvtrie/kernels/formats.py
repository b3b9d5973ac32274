"""Formats: the number formats that kernels read and write, and their names in CUDA.

Invariant: rows are in a format that models compute in, cells in any. Cost: none.
"""

from __future__ import annotations

import torch

__all__ = ["CELLS", "LARGEST", "ROWS", "VECTOR_BYTES"]

ROWS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Formats of rows: what projections give and attention takes."""

CELLS = {**ROWS, torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
"""Formats of pools."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The value of a quantised format's largest code at scale 1."""

VECTOR_BYTES = 16
"""A lane reads and writes this many bytes of a row at a time."""
