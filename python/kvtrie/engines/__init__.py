"""Clients that serve real models: one file per engine, imported only where it is used."""
