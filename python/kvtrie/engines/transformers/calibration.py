"""Calibration: measures how the KV format of a prefix changes next-token distributions.

The prefix of each prompt, except its last `native_last` tokens, is stored in a host tier of the
format. It is then dropped from the first tier, except the blocks of its first `native_first`
tokens, and the rest of the prompt is computed after it. The next-token distributions are compared
with the same computation in the model's own format.
Invariant: all formats see the same tokens and positions, every dropped block comes from the host
tier, and at least one block of each prompt comes back in the format. Cost: per format and prompt
one pass over the prompt, and the KV of one prompt in two tiers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtrie import BlockManager, Cost, ModelShape, Tier
from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.engines.identity.weights import checkpoint_digest
from kvtrie.engines.transformers import KvtrieCache
from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS, Layout
from kvtrie.settings.argument import whole
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel

__all__ = ["FormatCost", "calibrate", "document", "prompts_of"]

_PREFIX = 4  # equal parts of a prompt. All parts except the last are the prefix
_BF16 = 2
_ANY_COST_NS = 1e9  # high enough to load the whole prefix instead of computing it


@dataclass(frozen=True, slots=True)
class FormatCost:
    """Loss of accuracy and block size of a KV format.

    Attributes:
        kl_mean: mean KL divergence of next tokens from the native format, in nats.
        kl_p99: 99th percentile of the KL divergence over positions.
        top1: share of positions with the same most likely token.
        block_bytes: bytes of a block.
        of_bf16: `block_bytes` as a share of a bfloat16 block.
        tokens: tokens of all prompts with KV loaded back in the format.
    """

    kl_mean: float
    kl_p99: float
    top1: float
    block_bytes: int
    of_bf16: float
    tokens: int


def prompts_of(tokens: Sequence[int], length: int, most: int) -> list[torch.Tensor]:
    """Cut a text into at most `most` prompts of `length` tokens, or one shorter prompt.

    Args:
        tokens: tokens of a text.
        length: tokens of a prompt.
        most: the number of prompts.

    Raises:
        ConfigError: `length` or the text has fewer than 64 tokens.
    """
    whole("tokens of a prompt", length, 64, 2**20)
    whole("prompts", most, 1, 2**20)
    if len(tokens) < 64:  # noqa: PLR2004 - four blocks of 16
        raise ConfigError(f"the text has {len(tokens)} tokens, at least 64 wanted")
    starts = range(0, max(1, len(tokens) - length + 1), length)
    return [torch.tensor([list(tokens[at : at + length])]) for at in starts][:most]


def calibrate(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    *,
    block_tokens: int = 16,
    native_last: int = 0,
    native_first: int = 0,
    on_step: Callable[[str], object] = lambda _: None,
) -> dict[str, FormatCost]:
    """Return the cost of each format on prompts.

    Args:
        model: the model, on its device.
        prompts: token ids, `(1, tokens)` each.
        block_tokens: tokens per block.
        native_last: tokens at the end of a prefix to compute instead of load, so they keep the
            model's format.
        native_first: tokens at the start of a prefix to keep in the model's format. Their blocks
            stay in the first tier.
        on_step: called with the name of a format before it is measured.

    Raises:
        ConfigError: no prompts, a prompt without any block to load in a format (below two blocks,
            for example), or a model with KV that no tier can hold in a format.
    """
    if not prompts:
        raise ConfigError("prompts is empty, at least one wanted")
    shape = ModelShape.from_config(
        model.config,
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint=fingerprint(model),
    )
    bf16 = shape.layers * sum(_layer_bytes(shape, Layout(dtype="bfloat16"), block_tokens))
    whole("native_last", native_last, 0, 2**20)
    kept = -(-whole("native_first", native_first, 0, 2**20) // block_tokens)
    prefixes = [_prefix(each.shape[1], block_tokens, native_last, kept) for each in prompts]
    tokens = sum(prefix - kept for prefix in prefixes) * block_tokens
    native: list[torch.Tensor] = []
    costs: dict[str, FormatCost] = {}
    for name, layout in FORMATS.items():
        on_step(name)
        rows = [
            _after_prefix(model, shape, each, layout, block_tokens, prefix=prefix, kept=kept)
            for each, prefix in zip(prompts, prefixes, strict=True)
        ]
        native = native or rows
        size = shape.layers * sum(
            _layer_bytes(shape, layout or Layout(dtype=shape.dtype), block_tokens)
        )
        costs[name] = _compare(native, rows, size, bf16, tokens)
    return costs


def document(
    model: PreTrainedModel,
    costs: Mapping[str, FormatCost],
    prompts: Sequence[torch.Tensor],
    *,
    block_tokens: int,
    native_last: int = 0,
    native_first: int = 0,
) -> dict[str, Any]:
    """Return the contents of `calibration.json`: the costs, the model and the number of tokens.

    `checkpoint` is the digest of the weight files, for engines with their own weight loader. It is
    None for a model not loaded from files.
    """
    name = getattr(model, "name_or_path", "")
    files = checkpoint_digest(name, None, None) if name else None
    return {
        "version": 1,
        "fingerprint": fingerprint(model),
        "checkpoint": None if files is None else files.hex(),
        "block_tokens": block_tokens,
        "native_last": native_last,
        "native_first": native_first,
        "prompts": len(prompts),
        "tokens": sum(each.shape[1] for each in prompts),
        "formats": {name: asdict(cost) for name, cost in costs.items()},
    }


def _layer_bytes(shape: ModelShape, layout: Layout, block_tokens: int) -> tuple[int, ...]:
    return layout.planes(block_tokens, shape.rank_heads, shape.head_dim, shape.v_head_dim)


def _whole_prefix(length: int, block_tokens: int) -> int:
    """Return the blocks of a prompt's prefix, including any part computed for `native_last`."""
    return length // block_tokens * (_PREFIX - 1) // _PREFIX


def _prefix(length: int, block_tokens: int, native_last: int, kept: int) -> int:
    """Return the number of stored blocks of a prompt.

    Raises:
        ConfigError: no stored block would come back in a format.
    """
    prefix = (_whole_prefix(length, block_tokens) * block_tokens - native_last) // block_tokens
    if prefix > kept:
        return prefix
    least = (kept + 1) * block_tokens + native_last
    wanted = -(-least * _PREFIX // (_PREFIX - 1)) + block_tokens
    native = f", of which {kept} stay in the model's format by native_first" if kept else ""
    raise ConfigError(
        f"a prompt of {length} tokens, {wanted} wanted: {max(prefix, 0)} of its blocks are stored"
        f"{native}, so nothing would be measured"
    )


@torch.no_grad()
def _after_prefix(
    model: PreTrainedModel,
    shape: ModelShape,
    ids: torch.Tensor,
    layout: Layout | None,
    block_tokens: int,
    *,
    prefix: int,
    kept: int,
) -> torch.Tensor:
    """Return log-probabilities of next tokens after a prefix loaded from a tier in `layout`.

    The first `kept` of its `prefix` blocks stay in the first tier.
    """
    blocks, whole_prefix = ids.shape[1] // block_tokens, _whole_prefix(ids.shape[1], block_tokens)
    ids = ids.to(model.device)
    tiers = [Tier("gpu", blocks=blocks + 2), Tier("host", blocks=prefix, layout=layout)]
    manager = BlockManager(
        shape, tiers, block_tokens=block_tokens, cost=Cost(ns_per_token=_ANY_COST_NS)
    )
    with Executor(manager, open_pools(shape, tiers, block_tokens), workers=0) as executor:
        start = ids[:, : prefix * block_tokens]
        with KvtrieCache(model, executor, start) as cache:
            model(start, past_key_values=cache)
        executor.flush()
        manager.evict(prefix - kept, 0, now=executor.clock())  # from the end of the prompt
        with KvtrieCache(model, executor, ids) as cache:
            past = cache.get_seq_length()
            if past != start.shape[1]:
                raise ConfigError(f"{past} tokens came back of {start.shape[1]}")
            logits = model(ids[:, past:], past_key_values=cache).logits
    return logits[0, whole_prefix * block_tokens - past :].float().log_softmax(-1).cpu()


def _compare(
    native: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    size: int,
    bf16: int,
    tokens: int,
) -> FormatCost:
    pairs = list(zip(native, rows, strict=True))
    apart = torch.cat([(mine.exp() * (mine - other)).sum(-1) for mine, other in pairs])
    same = torch.cat([mine.argmax(-1) == other.argmax(-1) for mine, other in pairs])
    apart = apart.clamp(min=0).double()  # rounding can give negative values
    return FormatCost(
        kl_mean=float(apart.mean()),
        kl_p99=float(apart.quantile(0.99)),
        top1=float(same.double().mean()),
        block_bytes=size,
        of_bf16=round(size / bf16, 4),
        tokens=tokens,
    )
