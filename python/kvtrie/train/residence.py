"""Residence: places of the weights while parts of a model run.

Plain weights stay in place. Offloaded weights stay on the CPU with the optimiser: the forward phase
uses copies of all weights, the backward phase copies of a single row of cells at a time, and
gradients are accumulated on the CPU.
Invariant: after a batch every weight and its gradient are in their original place. Cost: two copies
of each weight to the device per batch, and a copy of each gradient back per row.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves parts untyped)

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from kvtrie.train.decoder import Decoder
    from kvtrie.train.head import HeadModel

__all__ = ["Offloaded", "Residence"]


class Residence:
    """Weights in a fixed place."""

    @contextmanager
    def forward(self) -> Generator[None]:
        """Provide all weights for the forward phase, including the head's gradients."""
        yield

    @contextmanager
    def row(self, layers: range, following: range | None) -> Generator[None]:
        """Provide the weights of a row of cells and prepare the following row."""
        del layers, following
        yield

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers on the computing device."""
        return x


class Offloaded(Residence):
    """Weights on the CPU, copied to a device for computation.

    Args:
        decoder: the model's parts.
        head: a head with or without weights.
        device: the computing device.
    """

    def __init__(self, decoder: Decoder, head: HeadModel, device: torch.device) -> None:
        self._decoder, self._head, self._device = decoder, head, device
        self._host_data: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._grads: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        self._coming: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for module in (decoder.model, head):
            for name, buffer in module.named_buffers():
                owner = module.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], buffer.to(device))
        if device.type == "cuda":
            for weight in self._every():
                weight.data = weight.data.pin_memory()

    def _every(self) -> list[torch.nn.Parameter]:
        return [*self._decoder.parameters(), *self._head.parameters()]

    def _of(self, layers: range) -> list[torch.nn.Parameter]:
        modules: list[torch.nn.Module] = [self._decoder.layers[at] for at in layers]
        if not layers.start:
            modules.append(self._decoder.embedding)
        return list(dict.fromkeys(each for module in modules for each in module.parameters()))

    @contextmanager
    def forward(self) -> Generator[None]:
        """Copy all weights to the device for the forward phase."""
        with self._on_device(self._every()):
            yield

    @contextmanager
    def row(self, layers: range, following: range | None) -> Generator[None]:
        """Provide a row's weights on the device and start copying the next row's weights."""
        with self._on_device(self._of(layers)):
            if following is not None and self._stream is not None:
                with torch.cuda.stream(self._stream):
                    for weight in self._of(following):
                        if weight not in self._host_data:
                            self._coming[weight] = self._copied(weight)
            yield

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Return numbers on the device."""
        return x.to(self._device)

    def _copied(self, weight: torch.nn.Parameter) -> torch.Tensor:
        # Copies also if the device is the CPU, for the same behaviour.
        return weight.detach().to(self._device, non_blocking=True, copy=True)

    @contextmanager
    def _on_device(self, weights: Iterable[torch.nn.Parameter]) -> Generator[None]:
        brought: Sequence[torch.nn.Parameter] = list(weights)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for weight in brought:
            copied = self._coming.pop(weight, None)
            self._host_data[weight], self._grads[weight] = weight.data, weight.grad
            weight.grad = None
            weight.data = self._copied(weight) if copied is None else copied
        try:
            yield
        finally:
            for weight in brought:
                found, before = weight.grad, self._grads.pop(weight)
                weight.grad = None
                weight.data = self._host_data.pop(weight)
                if found is not None:
                    added = found.to(weight.device)
                    weight.grad = added if before is None else before.add_(added)
                else:
                    weight.grad = before
