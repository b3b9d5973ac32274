"""Fusion of chunks: pieces of text whose KV is computed once and reused at any position."""

from kvtrie.fuse.context import Chunk, Context
from kvtrie.fuse.fetch import Fetch, Part
from kvtrie.fuse.store import CacheStore

__all__ = ["CacheStore", "Chunk", "Context", "Fetch", "Part"]
