"""The settings of a simulation, from TOML and from KEY=VALUE: one file per table of them."""

from kvtrie.sim.config.cost import Price
from kvtrie.sim.config.simulation import SimulationConfig, config_of, read_config
from kvtrie.sim.config.trace import TraceSource

__all__ = ["Price", "SimulationConfig", "TraceSource", "config_of", "read_config"]
