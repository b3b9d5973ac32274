"""Clients that serve real models: one file per engine, each imported only by who uses it."""
