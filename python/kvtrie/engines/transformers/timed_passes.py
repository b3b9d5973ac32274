"""Measure a model's passes and its device, for `kvtrie profile`.

Passes are timed by tokens and by context before the tokens, on the serving device. The device is
measured for memory bandwidth in bytes per second and for matrix multiplication in operations per
second.
Invariant: every figure is measured on this machine. Cost: seconds per cell at most, and the prefill
of the longest context.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtrie.fuse.passes import Device
from kvtrie.tiers import default_device
from kvtrie.transfer.timed_copies import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["time_decodes", "time_device", "time_passes", "time_prefill"]

_NS = 1_000_000_000
_ENOUGH_NS = 2 * _NS  # per cell. A cell ends early after this time
_FEWEST = 2
_COPIED_BYTES = 64 << 20
_SIDE = 1024


def time_prefill(
    model: Any,  # noqa: ANN401 - a transformers model
    block_tokens: int,
    contexts: Sequence[int],
    *,
    repeats: int,
) -> Iterator[tuple[int, Timing]]:
    """Measure the prefill of a block after warm contexts.

    Args:
        model: a causal language model. It moves to the device of a `gpu` tier.
        block_tokens: tokens of a block.
        contexts: tokens before the block, ascending.
        repeats: runs per context.

    Yields:
        Each context with the nanoseconds per token of the block.
    """
    from transformers import DynamicCache

    ids = _ids(model, max(contexts) + block_tokens)
    cache = DynamicCache(config=model.config)
    cached = 0
    with torch.no_grad():
        for context in contexts:
            if context > cached:
                model(input_ids=ids[:, cached:context], past_key_values=cache)
                cached = context
            block = ids[:, context : context + block_tokens]

            def once(block: torch.Tensor = block, context: int = context) -> None:
                model(input_ids=block, past_key_values=cache)
                _synchronize(model.device)
                cache.crop(context - cache.get_seq_length())

            timing = timing_of(once, repeats)
            per_token = Timing(
                timing.median / block_tokens, timing.spread / block_tokens, timing.runs
            )
            yield context, per_token


def time_passes(
    model: Any,  # noqa: ANN401 - a transformers model
    contexts: Sequence[int],
    tokens: Sequence[int],
    *,
    repeats: int,
) -> Iterator[tuple[int, int, float]]:
    """Measure passes of several sizes after warm contexts.

    Args:
        model: a causal language model. It moves to the device of a `gpu` tier.
        contexts: tokens before a pass, ascending.
        tokens: tokens of a pass.
        repeats: runs per cell, or fewer but at least two if they take more than two seconds.

    Yields:
        Context, tokens, and the median time of the pass in nanoseconds.
    """
    from transformers import DynamicCache

    ids = _ids(model, max(contexts) + max(tokens))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for context in contexts:
            if context > (cached := cache.get_seq_length()):
                model(input_ids=ids[:, cached:context], past_key_values=cache)
            for many in tokens:
                window = ids[:, context : context + many]

                def once(window: torch.Tensor = window, context: int = context) -> None:
                    model(input_ids=window, past_key_values=cache, logits_to_keep=1)
                    _synchronize(model.device)
                    cache.crop(context - cache.get_seq_length())

                yield context, many, _median(once, repeats)


def time_decodes(
    model: Any,  # noqa: ANN401 - a transformers model
    contexts: Sequence[int],
    requests: Sequence[int],
    *,
    repeats: int,
) -> Iterator[tuple[int, int, float]]:
    """Measure steps decoding one token for each request, after equal contexts.

    Args:
        model: a causal language model. It moves to the device of a `gpu` tier.
        contexts: tokens before the step, ascending.
        requests: numbers of requests per step.
        repeats: as for `time_passes`.

    Yields:
        Context, requests, and the median time of the step in nanoseconds.
    """
    from transformers import DynamicCache

    ids = _ids(model, max(contexts) + 1)
    with torch.no_grad():
        for many in requests:
            cache = DynamicCache(config=model.config)
            for context in contexts:
                if context > (cached := cache.get_seq_length()):
                    prompt = ids[:, cached:context].expand(many, -1)
                    model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
                token = ids[:, context : context + 1].expand(many, -1)

                def once(token: torch.Tensor = token, context: int = context) -> None:
                    model(input_ids=token, past_key_values=cache)  # noqa: B023 - called at once
                    _synchronize(model.device)
                    cache.crop(context - cache.get_seq_length())  # noqa: B023

                yield context, many, _median(once, repeats)


def time_device(dtype: str, *, repeats: int) -> Device:
    """Measure copies and matrix products on the device of a `gpu` tier.

    A copy of 64 MiB counts as read and written. A product of two square matrices of side 1024
    counts as `2 * 1024**3` operations. The result is the median of the runs.

    Args:
        dtype: torch's name of the format of the matrices.
        repeats: runs of each, or fewer but at least two if they take more than two seconds.
    """
    device = default_device()
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    one = torch.ones((_SIDE, _SIDE), dtype=getattr(torch, dtype), device=device)
    result = torch.empty_like(one)

    def copy() -> None:
        target.copy_(source)
        _synchronize(device)

    def multiply() -> None:
        torch.matmul(one, one, out=result)
        _synchronize(device)

    copied, multiplied = _median(copy, repeats), _median(multiply, repeats)
    return Device(2 * _COPIED_BYTES * _NS / copied, 2 * _SIDE**3 * _NS / multiplied)


def _ids(model: Any, number: int) -> torch.Tensor:  # noqa: ANN401 - a transformers model
    """Move a model to the device of a `gpu` tier. Return random tokens `(1, number)` there."""
    model.to(default_device())
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = np.random.default_rng(0).integers(1, vocabulary, number)
    return torch.from_numpy(ids)[None].to(model.device)  # type: ignore[no-untyped-call]


def _median(call: Callable[[], object], repeats: int) -> float:
    call()
    samples: list[int] = []
    while len(samples) < max(_FEWEST, repeats):
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
        if len(samples) >= _FEWEST and sum(samples) > _ENOUGH_NS:
            break
    return float(np.median(samples))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
