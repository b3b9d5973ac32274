"""Helpers of fusion tests: tiny models of every rotary kind, stores, chunks and plain reuse."""

from __future__ import annotations

import numpy as np
import torch
from tinymodels import COMMON, Lossy, some
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.engines.transformers import Decoder, fingerprint
from kvtrie.fuse import CacheStore, Chunk, Context
from kvtrie.fuse.chunker import Given
from kvtrie.fuse.prefill import compute
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor

BLOCK = 8
SIZES = (17, 9, 12)
"""Tokens of the chunks of most contexts."""
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
}
ORIGINAL = 64
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 6.0, 16.0],
    },
}


def model_of(name="llama", kind="default", **more):
    """A random model of 4 layers whose RoPE is of that kind."""
    torch.manual_seed(0)
    config, cls, options = MODELS[name]
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | KINDS[kind]
    longest = {"max_position_embeddings": ORIGINAL if kind == "dynamic" else 512}
    given = COMMON | longest | {"num_hidden_layers": 4, "num_key_value_heads": 2} | options | more
    return cls(config(rope_parameters=rope, **given)).eval()


def kv_of(decoder, tokens, prefix=()):
    """K and V of a chunk, per layer, computed alone after a prefix."""
    ids = torch.cat([torch.as_tensor(prefix, dtype=torch.int64), tokens])
    kv = []
    compute(decoder, ids, lambda _, k, v: kv.append((k[len(prefix) :], v[len(prefix) :])))
    return kv


def context_of(decoder, sizes, query=6, seed=1):
    """Chunks with their K and V, and a query."""
    parts = [some(seed + at, 1, size)[0] for at, size in enumerate(sizes)]
    chunks = [Chunk(part.numpy(), kv_of(decoder, part)) for part in parts]
    return Context(chunks, some(seed + 100, 1, query)[0].numpy())


def plain(sizes, query=6, seed=1):
    """The same chunks without K and V, to be found in a store."""
    parts = [some(seed + at, 1, size)[0].numpy() for at, size in enumerate(sizes)]
    return Context(parts, some(seed + 100, 1, query)[0].numpy())


def world(model, *, gpu=80, host=80, prefix=(), layout=None, lossy=False, **options):
    """A store for a model, and its executor."""
    shape = ModelShape.from_config(model.config, dtype="float32", fingerprint=fingerprint(model))
    more = {} if layout is None else {"layout": layout}
    tiers = [Tier("gpu", blocks=gpu), Tier("host", blocks=host, **more)]
    manager = BlockManager(shape, tiers, block_tokens=BLOCK, policy="lru", **options)
    pools = list(open_pools(shape, tiers, BLOCK))
    if lossy:
        pools[0] = Lossy(shape, gpu, BLOCK)
    executor = Executor(manager, pools)
    return CacheStore(executor, Given(), prefix=prefix), executor


def last_logits(model, ids, cache=None):
    """Logits of the last token, from a full prefill or with a cache of all earlier tokens."""
    with torch.no_grad():
        if cache is None:
            return model(ids, use_cache=False).logits[0, -1]
        return model(ids[:, -1:], past_key_values=cache).logits[0, -1]


def decoder_of(*args, **kwargs):
    model = model_of(*args, **kwargs)
    return model, Decoder(model)


def ids_of(context, prefix=()):
    """All tokens of a context after a prefix, in one sequence."""
    parts = [np.asarray(prefix, dtype=np.int64), *(chunk.tokens for chunk in context.chunks)]
    return torch.from_numpy(np.concatenate([*parts, context.query]))
