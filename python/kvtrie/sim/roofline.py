"""Roofline: step times of a model on a device, from datasheets.

A step takes the maximum of its arithmetic time and its memory time:

    arithmetic = 2 · active parameters · tokens + 4 · layers · query heads · head size · Σ context
    traffic    = parameters · bytes + KV bytes of a token · tokens in the cache
    step       = max(arithmetic / (peak · efficiency), traffic / (peak · efficiency)) + overhead

(Σ context: sum over computed tokens of the tokens each attends to.) Sizes are per rank of `tp`
ranks. Communication between ranks is part of the efficiencies. Steps with prefills and decodes add
the time of each in addition to reading the weights.
Invariant: as of `Passes`. Cost: a table of a few hundred cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvtrie.settings.argument import put, real, whole, word
from kvtrie.sim.passes import Passes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie.model.shape import ModelShape

__all__ = ["DEVICES", "Device", "Roofline"]

_NS = 1e9
_MOST = 1e18
_CONTEXTS = [0, *(1 << n for n in range(8, 21))]
_TOKENS = sorted({1, 2, *(1 << n for n in range(2, 14)), *(3 << n for n in range(1, 12))})
_REQUESTS = [1 << n for n in range(11)]


class Device(NamedTuple):
    """Speeds of a device, from its datasheet.

    Attributes:
        flops_per_s: 16-bit operations of the tensor cores per second, without sparsity.
        bytes_per_s: memory bandwidth.
    """

    flops_per_s: float
    bytes_per_s: float


DEVICES = {
    "A100": Device(312e12, 2.039e12),
    "H100": Device(989.4e12, 3.35e12),
    "H200": Device(989.4e12, 4.8e12),
    "B200": Device(2250e12, 8e12),
    "MI300X": Device(1307.4e12, 5.3e12),
}
"""SXM (A100: 80 GB) and OAM parts. docs/simulator.md lists the datasheets."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device.

    Attributes:
        parameters: parameters of the model, all read by each step.
        active_parameters: parameters used per token. None means all.
        device: a name in `DEVICES`.
        weight_bytes: bytes of a parameter.
        flops_per_s: replaces the device's.
        bytes_per_s: replaces the device's.
        flops_efficiency: reached share of the peak.
        memory_efficiency: reached share of the bandwidth.
        overhead_ns: fixed time of each step, added to its computation.
    """

    parameters: float
    active_parameters: float | None = None
    device: str = "H100"
    weight_bytes: float = 2.0
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    flops_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    overhead_ns: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        device = DEVICES[word("device", self.device, tuple(DEVICES))]
        parameters = real("parameters", self.parameters, 1, _MOST)
        given = {**self._given("active_parameters", parameters)}
        given |= {**self._given("flops_per_s", device.flops_per_s)}
        given |= {**self._given("bytes_per_s", device.bytes_per_s)}
        put(
            self,
            parameters=parameters,
            weight_bytes=real("weight_bytes", self.weight_bytes, 1 / 16, 16),
            flops_efficiency=real("flops_efficiency", self.flops_efficiency, 1e-3, 1),
            memory_efficiency=real("memory_efficiency", self.memory_efficiency, 1e-3, 1),
            overhead_ns=whole("overhead_ns", self.overhead_ns, 0, 2**40),
            **given,
        )

    def _given(self, name: str, default: float) -> dict[str, float]:
        value = getattr(self, name)
        return {name: default if value is None else real(name, value, 1, _MOST)}

    def passes(self, model: ModelShape) -> Passes:
        """Return the step times for a model's shape. `query_heads` defaults to the KV heads."""
        contexts = np.array(_CONTEXTS, dtype=np.float64)[:, None]
        tokens, requests = (np.array([axis], dtype=np.float64) for axis in (_TOKENS, _REQUESTS))
        attended = contexts * tokens + tokens * (tokens + 1) / 2
        prefill = self._ns(model, tokens, attended, contexts + tokens)
        decoded = requests * (contexts + 1)
        decode = self._ns(model, requests, decoded, decoded)
        zero = np.zeros((1, 1))
        base = float(self._ns(model, zero, zero, zero)[0, 0])
        return Passes.of(base, (_CONTEXTS, _TOKENS, prefill), (_CONTEXTS, _REQUESTS, decode))

    def _ns(
        self,
        model: ModelShape,
        tokens: NDArray[np.float64],
        attended: NDArray[np.float64],
        cached: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        heads = model.query_heads or model.kv_heads
        attention = 4 * model.layers * heads * model.head_dim * attended
        flops = (2 * (self.active_parameters or 0) * tokens + attention) / model.tp
        read = self.parameters * self.weight_bytes / model.tp + model.block_bytes(1) * cached
        computing = flops / ((self.flops_per_s or 1) * self.flops_efficiency)
        reading = read / ((self.bytes_per_s or 1) * self.memory_efficiency)
        return np.maximum(computing, reading) * _NS + self.overhead_ns
