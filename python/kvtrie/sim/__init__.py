"""Simulator without bytes: traces of block hashes played through a manager.

```text
sweep, grid --> run --> readers, config, requests --> workloads      runs from a file of settings
   |             +--> figures, decisions, ends
  size         calibrate
replay --> ends, fates      rooms, offline: bounds without time      capacities: one pass, all sizes
roofline --> passes         perfetto, pictures, headline: output of runs
```
"""
