"""The keys `--kv_cache.*`, shared by several commands."""

from __future__ import annotations

from typing import Any

__all__ = ["add_cache"]


def add_cache(parser: Any) -> None:  # noqa: ANN401 - a jsonargparse parser
    """Add the keys of a selective cache."""
    cache = parser.add_argument_group("kv_cache", "rows to keep, and how")
    add = cache.add_argument
    add(
        "--kv_cache.name",
        type=str,
        default="h2o-torch-quantized8",
        help="{policy}-{buffers}. Your own policy is package.module:Name",
    )
    add(
        "--kv_cache.cache_length",
        type=int | list[int],
        default=16384,
        help="rows per layer and head, a number or a list with a number per layer",
    )
    add("--kv_cache.chunk_size", type=int, default=1024, help="tokens per step after the first")
    add("--kv_cache.randomize_chunk_sizes", type=bool, default=False, help="draw the steps")
    add("--kv_cache.seed", type=int, default=0, help="of drawn steps")
    add(
        "--kv_cache.cache_kwargs",
        type=dict[str, Any],
        default={},
        help="arguments of the policy, as --kv_cache.cache_kwargs.grace_period 16",
    )
