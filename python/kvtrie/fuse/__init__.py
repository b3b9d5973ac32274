"""Fusion of chunks: what cuts texts into pieces whose KV is reused at any position."""
