"""Passes: how long a model's forward pass takes, over its tokens and the context before them.

A pass over few tokens costs more per token than one over many: weights are read once per pass. Both
axes are measured on the device that serves, as are its memory bandwidth in bytes per second and its
matrix multiplication in operations per second.
Invariant: times never fall with more tokens or more context. Cost of a look-up: a search in a table
of a few numbers; of measuring, seconds per cell at most.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvtrie.errors import ConfigError
from kvtrie.tiers import default_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Device", "PassTable", "time_decodes", "time_device", "time_passes"]

_NS = 1_000_000_000
_ENOUGH_NS = 2 * _NS  # of one cell, whose runs may be fewer then
_FEWEST = 2
_COPIED_BYTES = 64 << 20
_SIDE = 1024


class Device(NamedTuple):
    """Measured speeds of the device that computes.

    Attributes:
        memory_bytes_per_s: bytes that a copy within its memory reads and writes, per second.
        flops_per_s: operations of a product of matrices in the model's format, per second.
    """

    memory_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class PassTable:
    """Nanoseconds of a pass, by tokens before it and tokens in it.

    Attributes:
        contexts: tokens before the pass, ascending.
        tokens: tokens of the pass, ascending.
        ns: for each context a row with the time of a pass of each size, all layers, nanoseconds.

    Raises:
        ConfigError: axes that do not ascend, or times that are no numbers above 0 or fall.
    """

    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    ns: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        table = np.array(self.ns, dtype=float)
        axes = (self.contexts, self.tokens)
        if table.shape != tuple(map(len, axes)) or not table.size:
            raise ConfigError(f"times {table.shape} for contexts and tokens {axes}")
        if any((np.diff(axis) <= 0).any() for axis in axes) or self.tokens[0] < 1:
            raise ConfigError(f"contexts and tokens of a pass must ascend: {axes}")
        falls = any((np.diff(table, axis=axis) < 0).any() for axis in (0, 1))
        if falls or not (np.isfinite(table).all() and (table > 0).all()):
            raise ConfigError(f"times of passes must be above 0 and never fall: {self.ns}")

    @classmethod
    def of(cls, cells: Iterable[tuple[int, int, float]]) -> PassTable:
        """Return the table of measured cells (context, tokens, nanoseconds), one for each pair.

        More tokens or more context cost no less: a time that falls is noise, and is raised.

        Args:
            cells: for each context and each size one cell.

        Raises:
            ConfigError: a pair of context and size without a cell.
        """
        cells = list(cells)
        contexts = sorted({context for context, _, _ in cells})
        tokens = sorted({many for _, many, _ in cells})
        found = {(context, many): ns for context, many, ns in cells}
        try:
            table = np.array([[found[at, many] for many in tokens] for at in contexts])
        except KeyError as error:
            raise ConfigError(f"no time of a pass for {error.args[0]}") from error
        for axis in (0, 1):
            table = np.maximum.accumulate(table, axis=axis)
        return cls(tuple(contexts), tuple(tokens), tuple(map(tuple, table.tolist())))

    def pass_ns(self, tokens: float, context: float) -> float:
        """Time of a pass of `tokens` after `context` tokens, all layers, in nanoseconds.

        Interpolates linearly between the measured cells and extrapolates with the last slope; a
        pass of fewer tokens than the smallest measured one takes as long as that. 0 for 0 tokens.
        """
        if tokens <= 0:
            return 0.0
        at = max(tokens, self.tokens[0])
        column = [_along(self.tokens, row, at) for row in self.ns]
        return _along(self.contexts, column, max(context, self.contexts[0]))


def time_passes(
    model: Any,  # noqa: ANN401 - a transformers model
    contexts: Sequence[int],
    tokens: Sequence[int],
    *,
    repeats: int,
) -> Iterator[tuple[int, int, float]]:
    """Measure passes of several sizes after warm contexts.

    Args:
        model: a causal language model; it moves to the device of a `gpu` tier.
        contexts: tokens before a pass, ascending.
        tokens: tokens of a pass.
        repeats: runs per cell; fewer, at least two, once they have taken more than two seconds.

    Yields:
        Context, tokens, and the median time of the pass in nanoseconds.
    """
    from transformers import DynamicCache

    model.to(default_device())
    vocabulary = int(model.config.get_text_config().vocab_size)
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.integers(1, vocabulary, max(contexts) + max(tokens)))[None]  # type: ignore[no-untyped-call]
    ids = ids.to(model.device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for context in contexts:
            if context > (cached := cache.get_seq_length()):
                model(input_ids=ids[:, cached:context], past_key_values=cache)
            for many in tokens:
                window = ids[:, context : context + many]

                def once(window: torch.Tensor = window, context: int = context) -> None:
                    model(input_ids=window, past_key_values=cache, logits_to_keep=1)
                    _settle(model.device)
                    cache.crop(context - cache.get_seq_length())

                yield context, many, _median(once, repeats)


def time_decodes(
    model: Any,  # noqa: ANN401 - a transformers model
    contexts: Sequence[int],
    requests: Sequence[int],
    *,
    repeats: int,
) -> Iterator[tuple[int, int, float]]:
    """Measure steps in which requests decode one token each after equal contexts.

    Args:
        model: a causal language model; it moves to the device of a `gpu` tier.
        contexts: tokens before the step, ascending.
        requests: numbers of requests that decode together.
        repeats: as for `time_passes`.

    Yields:
        Context, requests, and the median time of the step in nanoseconds.
    """
    from transformers import DynamicCache

    model.to(default_device())
    vocabulary = int(model.config.get_text_config().vocab_size)
    random = np.random.default_rng(0)
    ids = torch.from_numpy(random.integers(1, vocabulary, max(contexts) + 1))[None]  # type: ignore[no-untyped-call]
    ids = ids.to(model.device)
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
                    _settle(model.device)
                    cache.crop(context - cache.get_seq_length())  # noqa: B023

                yield context, many, _median(once, repeats)


def time_device(dtype: str, *, repeats: int) -> Device:
    """Measure copies and matrix products on the device of a `gpu` tier.

    A copy of 64 MiB counts as read and written; a product of two square matrices of side 1024 as
    `2 * 1024**3` operations. The median of the runs counts.

    Args:
        dtype: torch's name of the format of the matrices.
        repeats: runs of each; fewer, at least two, once they have taken more than two seconds.
    """
    device = default_device()
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    one = torch.ones((_SIDE, _SIDE), dtype=getattr(torch, dtype), device=device)
    result = torch.empty_like(one)

    def copy() -> None:
        target.copy_(source)
        _settle(device)

    def multiply() -> None:
        torch.matmul(one, one, out=result)
        _settle(device)

    copied, multiplied = _median(copy, repeats), _median(multiply, repeats)
    return Device(2 * _COPIED_BYTES * _NS / copied, 2 * _SIDE**3 * _NS / multiplied)


def _along(axis: Sequence[int], values: Sequence[float], at: float) -> float:
    """Interpolate between the points of an axis; extrapolate with the last slope."""
    if len(axis) == 1:  # in proportion: one point has no slope
        return values[0] * at / axis[0] if axis[0] else values[0]
    low = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
    share = (at - axis[low]) / (axis[low + 1] - axis[low])
    return values[low] + share * (values[low + 1] - values[low])


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


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
