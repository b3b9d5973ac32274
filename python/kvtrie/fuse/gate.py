"""Gate: checks of a model before its first fusion.

Keys computed at the start and rotated to the last position in use must equal keys computed there,
and fusion with all tokens recomputed must equal the model's full prefill. No list of supported
models is needed: wrongly read tables, layers with a missing input, and frequencies changing beyond
a length all show in these two errors.
Invariant: a changed model and a longer context are checked again. Cost: two passes of 16 tokens up
to attention for every new longest length, and four passes over at most 48 tokens once per model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kvtrie.errors import ConfigError
from kvtrie.fuse.backing import Tensors
from kvtrie.fuse.context import Chunk
from kvtrie.fuse.fusion import Fusion, Settings
from kvtrie.fuse.log import Stopwatch
from kvtrie.fuse.memory import InMemory
from kvtrie.fuse.prefill import compute
from kvtrie.fuse.rotation import Rotation
from kvtrie.fuse.select import every

if TYPE_CHECKING:
    from kvtrie.fuse.layers import DecoderLayers

__all__ = ["divergence", "pass_gate", "rotation_error"]

_LEAST = 1e-3
"""Largest error of a rotated key, relative to its norm. Wrong tables give about 1."""

_SHORT = 48
_KEYS = 16
_passed: WeakKeyDictionary[DecoderLayers, tuple[object, int]] = WeakKeyDictionary()


def pass_gate(decoder: DecoderLayers, ids: torch.Tensor) -> None:
    """Check a model, unless it has passed with a context of this length.

    Args:
        decoder: the model.
        ids: int64 `(T,)`, the tokens to fuse.

    Raises:
        ConfigError: a rotated key differs from the key computed there, with the length and the
            error, or fusion at ratio 1 differs from the full prefill.
    """
    name, longest = _passed.get(decoder, (None, 0))
    mine = decoder.identity()
    if name != mine:
        longest = 0
    if len(ids) <= longest:
        return
    # Both compared keys are rounded to the format, for bfloat16 to 2^-8.
    allowed = max(_LEAST, 4 * torch.finfo(decoder.dtype).eps)
    error = rotation_error(decoder, ids)
    if not error <= allowed:
        raise ConfigError(
            f"keys turned to position {len(ids) - 1} are {error:.1e} of their norm away from those "
            f"computed there, {allowed:.1e} allowed: the model turns otherwise in a sequence of "
            f"{len(ids)} tokens, so these chunks cannot be fused; compute them in one prefill"
        )
    if not longest:
        apart = _full_recompute(decoder, ids)
        if not apart <= allowed:
            raise ConfigError(
                f"with all tokens recomputed, fusion's logits are {apart:.1e} of the largest one "
                f"away from a full prefill's over {min(len(ids), _SHORT)} tokens, {allowed:.1e} "
                "allowed: this model needs more than its layers are given here"
            )
    _passed[decoder] = mine, len(ids)


@torch.no_grad()
def rotation_error(decoder: DecoderLayers, ids: torch.Tensor) -> float:
    """Return the largest relative error of keys rotated from a sequence's start to its end.

    Keys of the first 16 tokens, computed at positions from 0 on as in a short chunk, are rotated to
    the last positions of `len(ids)` tokens and compared with keys computed there. This is done at
    layer 0 and at the first layer of each further set of tables. Zero keys, for example of padding
    tokens, are ignored.
    """
    length = len(ids)
    some = ids[:_KEYS]
    old = torch.arange(len(some), device=decoder.device)
    new = old + length - len(some)
    hidden = decoder.embed(some)
    seen: set[int] = set()
    worst = 0.0
    for layer, rope in enumerate(decoder.ropes(length)):
        if rope is None or id(rope) in seen:
            continue
        seen.add(id(rope))
        keys = decoder.project(layer, hidden, old, len(some))[0].float()
        right = decoder.project(layer, hidden, new, length)[0].float()
        rotated = torch.empty_like(keys)
        Rotation.between(rope, old, new).into(keys, rotated)
        apart = (rotated - right).square().sum(dim=(1, 2))
        norm = right.square().sum(dim=(1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
        worst = max(worst, float((apart / norm).max().sqrt()))
    if not seen:
        raise ConfigError("no layer of this model turns its keys: there are no positions to turn")
    return worst


@torch.no_grad()
def divergence(truth: torch.Tensor, mine: torch.Tensor) -> float:
    """Return KL(truth || mine) of two rows of logits, in nats, summed in fp64."""
    right, got = (each.double().log_softmax(dim=-1) for each in (truth, mine))
    return float((right.exp() * (right - got)).sum().clamp(min=0.0))


def _full_recompute(decoder: DecoderLayers, ids: torch.Tensor) -> float:
    """Return the largest error of fusion at ratio 1 relative to the largest prefill logit."""
    short = ids[:_SHORT]
    third = max(1, len(short) // 3)
    parts = [part for part in (short[:third], short[third : 2 * third]) if len(part)]
    query = short[2 * third :]
    if not len(query):  # one or two tokens: all of them are the query
        parts, query = [], short
    chunks = [Chunk(part.cpu().numpy(), _kv(decoder, part)) for part in parts]
    memory = Tensors(decoder.layers, decoder.widths, len(short), decoder.dtype, decoder.device)
    settings = Settings(every, (1.0,), at=0, rank_layers=(), probe=0, seed=0)
    fusion = Fusion(
        decoder,
        InMemory(chunks),
        memory,
        query.cpu().numpy(),
        settings=settings,
        watch=Stopwatch(decoder.device),
        compute_lost=lambda: None,
    )
    fusion.run()
    mine, truth = fusion.logits(), decoder.prefill(short).float()
    return float((mine - truth).abs().max() / truth.abs().max())


def _kv(decoder: DecoderLayers, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    compute(decoder, ids, lambda _, keys, values: found.append((keys, values)))
    return found
