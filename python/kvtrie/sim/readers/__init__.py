"""Readers of traces, one file per format; `kvtrie.sim.requests` chooses among them."""
