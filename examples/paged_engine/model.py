"""Model: one rank's part of a Llama, with attention over block tables.

A rank has some KV heads, the query heads that read them, and the columns of `o_proj` and
`down_proj` that belong to them. The output of those two is a partial sum; `add` completes it.
Invariant: in each layer the KV of the whole batch is written before any is read, and a token sees
the keys at positions up to its own. So a sequence may be computed in pieces, holes among them.
Cost: one pass over the batch; attention gathers the blocks of one sequence at a time.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (torch leaves methods untyped)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.tiers import Pool

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Sequence:
    """The tokens of one request that a step computes.

    Attributes:
        tokens: the tokens whose KV is to be written.
        positions: their positions, ascending; the last one is the end of the sequence.
        table: the slots of the sequence's blocks, in logical order.
    """

    tokens: list[int]
    positions: list[int]
    table: list[int]


def shard(model: Any, rank: int, ranks: int) -> dict[str, Any]:  # noqa: ANN401 - LlamaForCausalLM
    """A rank's weights as plain arrays, which travel to its process."""
    weights: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        whole, kind = tensor.numpy(), name.split(".")[-2]
        axis = 0 if kind in _ROWS else 1 if kind in _COLUMNS else None
        weights[name] = whole if axis is None else np.split(whole, ranks, axis)[rank]
    return weights


class Model:
    """A shard that computes.

    Args:
        config: the model's own, as a dictionary.
        weights: what `shard` gave for this rank.
        add: gives the sum of a tensor over all ranks.
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, Any],
        add: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._weights = {name: torch.as_tensor(array) for name, array in weights.items()}
        self._add = add
        self._layers: int = config["num_hidden_layers"]
        self._dim: int = config["head_dim"]
        self._epsilon: float = config["rms_norm_eps"]
        even = torch.arange(0, self._dim, 2) / self._dim
        self._pace = 1.0 / config["rope_parameters"]["rope_theta"] ** even

    def blocks_of(self, pool: Pool) -> torch.Tensor:
        """A pool's memory as `(slots, layers, K and V, tokens, heads, dim)`, without a copy.

        It begins as NaN, so that a read of KV that was never written shows.
        """
        heads = len(self._weights["model.layers.0.self_attn.k_proj.weight"]) // self._dim
        shape = (pool.blocks, self._layers, 2, pool.block_tokens, heads, self._dim)
        return pool.planes[0].view(torch.float32).view(shape).fill_(torch.nan)

    @torch.inference_mode()
    def forward(self, batch: list[Sequence], pool: torch.Tensor) -> torch.Tensor:
        """Write the KV of a batch into `pool`; return the logits after each sequence's end."""
        size, lengths = pool.shape[3], [len(one.tokens) for one in batch]
        positions = torch.tensor([at for one in batch for at in one.positions])
        slots = torch.tensor([one.table[at // size] for one in batch for at in one.positions])
        angle = (positions[:, None] * self._pace).repeat(1, 2)[:, None]
        tokens = torch.tensor([token for one in batch for token in one.tokens])
        hidden = self._weights["model.embed_tokens.weight"][tokens]
        for layer in range(self._layers):
            at = f"model.layers.{layer}."
            x = self._norm(hidden, at + "input_layernorm")
            heads = [self._linear(x, f"{at}self_attn.{kind}_proj") for kind in "qkv"]
            query, key, value = (x.unflatten(-1, (-1, self._dim)) for x in heads)
            pool[slots, layer, 0, positions % size] = _rotate(key, angle)
            pool[slots, layer, 1, positions % size] = value
            queries = _rotate(query, angle).split(lengths)
            read = [_attend(q, one, pool[:, layer]) for q, one in zip(queries, batch, strict=True)]
            hidden = hidden + self._add(self._linear(torch.cat(read), at + "self_attn.o_proj"))
            x = self._norm(hidden, at + "post_attention_layernorm")
            gate = functional.silu(self._linear(x, at + "mlp.gate_proj"))
            wide = gate * self._linear(x, at + "mlp.up_proj")
            hidden = hidden + self._add(self._linear(wide, at + "mlp.down_proj"))
        ends = torch.tensor(lengths).cumsum(0) - 1
        return self._linear(self._norm(hidden[ends], "model.norm"), "lm_head")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._weights[name + ".weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[name + ".weight"]
        return functional.rms_norm(x, weight.shape, weight, self._epsilon)


def _rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-right, left), dim=-1) * angle.sin()


def _attend(query: torch.Tensor, one: Sequence, pool: torch.Tensor) -> torch.Tensor:
    """Return attention of queries `(n, heads, dim)` over a sequence's blocks of one layer."""
    keys = one.positions[-1] + 1
    kv = pool[torch.tensor(one.table)].transpose(0, 1).flatten(1, 2)[:, :keys].transpose(1, 2)
    seen = torch.arange(keys) <= torch.tensor(one.positions)[:, None]
    read = functional.scaled_dot_product_attention(
        query.transpose(0, 1), kv[0], kv[1], attn_mask=seen, enable_gqa=True
    )
    return read.transpose(0, 1).flatten(1)
