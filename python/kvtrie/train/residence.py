"""Residence: where weights are while parts of a model run.

Plain weights stay where they are. Offloaded ones stay on the CPU with the optimiser: the forward
phase runs on copies of all, the backward phase on copies of one row of cells at a time, and
gradients are added up on the CPU.
Invariant: after a batch every weight is where it was, and so is its gradient. Cost: a copy
of each weight to the device twice per batch, of each gradient back once per row.
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
    """Weights that stay where they are."""

    @contextmanager
    def forward(self) -> Generator[None]:
        """The forward phase, with the head's gradients."""
        yield

    @contextmanager
    def row(self, layers: range, following: range | None) -> Generator[None]:
        """A row of cells, and the one that comes after it."""
        del layers, following
        yield

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers where they are worked on."""
        return x


class Offloaded(Residence):
    """Weights that stay on the CPU.

    Args:
        decoder: of the model.
        head: with weights or without.
        device: where parts run.
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
        """All weights on the device."""
        with self._there(self._every()):
            yield

    @contextmanager
    def row(self, layers: range, following: range | None) -> Generator[None]:
        """A row's weights on the device; the next row's are on their way."""
        with self._there(self._of(layers)):
            if following is not None and self._stream is not None:
                with torch.cuda.stream(self._stream):
                    for weight in self._of(following):
                        if weight not in self._host_data:
                            self._coming[weight] = self._copied(weight)
            yield

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers on the device."""
        return x.to(self._device)

    def _copied(self, weight: torch.nn.Parameter) -> torch.Tensor:
        # Copies also if the device is the CPU, so that both behave alike.
        return weight.detach().to(self._device, non_blocking=True, copy=True)

    @contextmanager
    def _there(self, weights: Iterable[torch.nn.Parameter]) -> Generator[None]:
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
