"""The settings of a simulation, from TOML and from KEY=VALUE: one file per table of them.

```text
simulation --> document                                     the TOML, and KEY=VALUE over it
    +--> manager --> trace,  machines --> cost, rent, tiers
    +--> directory, engine, goals, lanes, peers, remote, router, transfer
all of these --> table                                      how a table is read and checked
```
"""

from kvtrie.sim.config.cost import Price
from kvtrie.sim.config.simulation import SimulationConfig, config_of, read_config
from kvtrie.sim.config.trace import TraceSource

__all__ = ["Price", "SimulationConfig", "TraceSource", "config_of", "read_config"]
