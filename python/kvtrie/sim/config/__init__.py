"""Settings of a simulation, from TOML and KEY=VALUE, with a file per settings table.

```text
simulation --> document                                     TOML, changed by KEY=VALUE
    +--> manager --> trace,  machines --> cost, rent, tiers
    +--> directory, engine, goals, lanes, peers, remote, router, transfer
all of these --> table                                      reading and checking of tables
```
"""

from kvtrie.sim.config.cost import Price
from kvtrie.sim.config.simulation import SimulationConfig, config_of, read_config
from kvtrie.sim.config.trace import TraceSource

__all__ = ["Price", "SimulationConfig", "TraceSource", "config_of", "read_config"]
