"""Helpers of kernel tests: three blocks of four tokens in any layout, and random rows."""

import torch

from kvtrie.kernels import Pages
from kvtrie.model.layout import Layout

SIZES = {"blocks": 3, "block_tokens": 4, "heads": 2, "head_dim": 16}


def pages(dtype="float32", scales="none", **more):
    layout = Layout(dtype=dtype, scales=scales, **more)
    sizes = layout.planes(4, 2, 16)
    memory = [torch.zeros(3 * size, dtype=torch.uint8) for size in sizes]
    given = [torch.full((1,), 0.5)] * 2 if scales == "tensor" else ()
    return Pages.of(memory, layout, **SIZES, scales=given)


def rows(tokens=2, dtype=torch.float32):
    return torch.randn(tokens, 2, 16).to(dtype)
