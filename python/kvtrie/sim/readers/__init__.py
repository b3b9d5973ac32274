"""Trace readers, with a file per format, chosen by `kvtrie.sim.requests`."""
