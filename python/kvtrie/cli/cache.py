"""The keys `--kv_cache.*`, which several commands share."""

from __future__ import annotations

from typing import Any

__all__ = ["add_cache"]


def add_cache(parser: Any) -> None:  # noqa: ANN401 - a jsonargparse parser
    """Add the keys that say what a selective cache is."""
    cache = parser.add_argument_group("kv_cache", "rows that are kept, and how")
    add = cache.add_argument
    add(
        "--kv_cache.name",
        type=str,
        default="h2o-torch-quantized8",
        help="{policy}-{buffers}; a policy of yours is package.module:Name",
    )
    add(
        "--kv_cache.cache_length",
        type=int | list[int],
        default=16384,
        help="rows per layer and head, one number or a list with one per layer",
    )
    add("--kv_cache.chunk_size", type=int, default=1024, help="tokens per step after the first")
    add("--kv_cache.randomize_chunk_sizes", type=bool, default=False, help="draw the steps")
    add("--kv_cache.seed", type=int, default=0, help="of drawn steps")
    add(
        "--kv_cache.cache_kwargs",
        type=dict[str, Any],
        default={},
        help="arguments of the policy, such as --kv_cache.cache_kwargs.grace_period 16",
    )
