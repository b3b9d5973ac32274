"""GradientSettings: sizes of cells, and storage of checkpoints.

Invariant: only the quantisers change gradients. Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtrie.settings.argument import folder, put, real, whole, word

__all__ = ["QUANTISERS", "GradientSettings"]

QUANTISERS = {"torch-quantized8": 8, "torch-quantized4": 4}
"""Names of quantisers of checkpoints, with the bits of a number."""

_MOST_LAYERS = 65_535
_MOST_TIMES = 1e6


@dataclass(frozen=True, slots=True)
class GradientSettings:
    """Cells, and the two kinds of checkpoints.

    Attributes:
        layers_per_cell: layers of a row of cells. More layers need more memory for a cell's graph
            and less memory for layer inputs.
        chunks_per_cell_multiplier: steps join a cell while its tokens are at most this multiple of
            the cache's rows. A longer step is a separate cell.
        layercp_qname: quantiser of layer inputs, "torch-quantized8" or "torch-quantized4". None
            keeps them exact.
        cachecp_qname: the same for K and V at the start of a cell.
        checkpoint_dir: folder for layer inputs. None keeps them in memory.

    Raises:
        ConfigError: a number out of range, or an unknown name.
    """

    layers_per_cell: int = 1
    chunks_per_cell_multiplier: float = 1.0
    layercp_qname: str | None = None
    cachecp_qname: str | None = None
    checkpoint_dir: str | None = None

    def __post_init__(self) -> None:
        put(
            self,
            layers_per_cell=whole("layers_per_cell", self.layers_per_cell, 1, _MOST_LAYERS),
            chunks_per_cell_multiplier=real(
                "chunks_per_cell_multiplier", self.chunks_per_cell_multiplier, 0.0, _MOST_TIMES
            ),
        )
        for name in ("layercp_qname", "cachecp_qname"):
            given = getattr(self, name)
            put(self, **{name: None if given is None else word(name, given, QUANTISERS)})
        if self.checkpoint_dir is not None:
            put(self, checkpoint_dir=folder("checkpoint_dir", self.checkpoint_dir))
