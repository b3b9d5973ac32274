"""SimulationConfig: all settings of a run.

Invariant: all values are checked, an error names the key and the value, and unknown keys are
refused. Cost: read once per run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.model.group_pages import GroupPages
from kvtrie.model.shape import ModelShape
from kvtrie.settings.argument import shown
from kvtrie.settings.resume import ResumePoints
from kvtrie.sim.config.directory import directory_of
from kvtrie.sim.config.document import change, read_document
from kvtrie.sim.config.engine import engine_of
from kvtrie.sim.config.goals import goals_of
from kvtrie.sim.config.lanes import lanes_of
from kvtrie.sim.config.machines import Machines, machines_of
from kvtrie.sim.config.manager import block_tokens_of, manager_of
from kvtrie.sim.config.peers import peers_of
from kvtrie.sim.config.remote import remote_of, with_remote
from kvtrie.sim.config.router import router_of
from kvtrie.sim.config.table import Table, made, plain
from kvtrie.sim.config.trace import trace_of
from kvtrie.sim.config.transfer import transfer_of
from kvtrie.sim.models import model_named
from kvtrie.sim.readers.lines import MOST_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvtrie.model.cost import Cost
    from kvtrie.settings.tier import Tier
    from kvtrie.sim.config.cost import Price
    from kvtrie.sim.config.goals import Goals
    from kvtrie.sim.config.rent import Rent
    from kvtrie.sim.config.trace import TraceSource

__all__ = ["SimulationConfig", "config_of", "read_config"]


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Checked settings of a run.

    Attributes:
        trace: source of requests.
        model: model shape on each machine.
        tiers: tiers of each machine, fastest first. A shared store is the last tier.
        price: computation time of tokens.
        cost: the managers' cost model of the same engine.
        seed: seed of all draws.
        block_tokens: real tokens per block.
        manager: further arguments of `Simulation`, by name.
        goals: latency limits of a request to count as goodput.
        rent: price of machines per hour.
        resume: resumable borders of separate layer groups. None keeps all tokens of all layers.
        machines: groups of machines with different tiers, price, cost or rent. The fields above are
            of the first machine. Empty if all machines are equal.
    """

    trace: TraceSource
    model: ModelShape
    tiers: tuple[Tier, ...]
    price: Price
    cost: Cost | str
    seed: int = 0
    block_tokens: int = 16
    manager: dict[str, Any] = field(default_factory=dict[str, Any])
    goals: Goals | None = None
    rent: Rent | None = None
    resume: ResumePoints | None = None
    machines: tuple[Machines, ...] = ()

    @property
    def machine_groups(self) -> tuple[Machines, ...]:
        """Groups of equal machines."""
        count: int = self.manager.get("machines", 1)
        one = Machines(count, self.tiers, self.price, self.cost, self.rent)
        return self.machines or (one,)

    @property
    def most_blocks(self) -> int:
        """Maximum blocks of a prompt accepted from a trace."""
        tiers = (tier for group in self.machine_groups for tier in group.tiers)
        return max(MOST_BLOCKS, *map(self.room, tiers))

    @property
    def shared(self) -> Tier | None:
        """Last tier, if it is a store shared by all machines."""
        return self.tiers[-1] if self.manager.get("remote") is not None else None

    def rooms(self) -> list[int]:
        """Return the room of each tier in blocks, over all machines."""
        rows = [[number * self.room(tier) for tier, number in row] for _, row in self._numbers()]
        return [sum(column) for column in zip(*rows, strict=True)]

    def room_bytes(self) -> int:
        """Return the bytes of all tiers of all machines, including padding."""
        return sum(
            number * tier.room_bytes(self.model, self.block_tokens)
            for _, row in self._numbers()
            for tier, number in row
        )

    def per_hour(self) -> float | None:
        """Return the price of all machines per hour, or None without prices.

        The price of a shared store is the first machine's.
        """
        rents = [
            one.count * one.rent.gpu_hour
            + sum(
                number * one.rent.per_hour(tier, self.model, self.block_tokens)
                for tier, number in row
            )
            for one, row in self._numbers()
            if one.rent is not None
        ]
        return sum(rents) if rents else None

    def _numbers(self) -> Iterator[tuple[Machines, list[tuple[Tier, int]]]]:
        """Yield the groups of equal machines, with the number of each of their tiers."""
        for at, one in enumerate(self.machine_groups):
            row = [(tier, one.count) for tier in one.tiers]
            if self.shared is not None:
                row[-1] = (one.tiers[-1], int(at == 0))
            yield one, row

    def room(self, tier: Tier) -> int:
        """Return the room of a tier in blocks. With separate layer groups, of the first group.

        Args:
            tier: one of `tiers`.

        Raises:
            ConfigError: as for `Tier.room`.
        """
        if self.resume is None:
            return tier.room(self.model, self.block_tokens)
        pages = GroupPages.of(self.model, tier, self.block_tokens)
        return max(1, pages.bytes // pages.slots[0])


def read_config(
    path: Path,
    changes: Iterable[str] = (),
    *,
    model: ModelShape | None = None,
    resume: ResumePoints | None = None,
) -> SimulationConfig:
    """Read a settings file.

    Args:
        path: a TOML file. A relative path of its trace starts at its folder.
        changes: `KEY=VALUE` changes of the file, with dotted keys and list positions, for example
            `tiers.0.blocks=9`. A value is TOML or a word.
        model: replaces the file's model.
        resume: resumable borders of separate layer groups of the model.

    Raises:
        ConfigError: an unreadable file, an unknown key, or an invalid value.
    """
    document = read_document(path)
    for stated in changes:
        change(document, stated)
    return config_of(document, path.parent, model=model, resume=resume)


def config_of(
    document: dict[str, Any],
    folder: Path,
    *,
    model: ModelShape | None = None,
    resume: ResumePoints | None = None,
) -> SimulationConfig:
    """Check a document of settings.

    Args:
        document: tables of a file, as read by `tomllib`.
        folder: base of a relative trace path.
        model: replaces the document's model.
        resume: as for `read_config`.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    top = Table("", document)
    seed = top.number("seed", 0, 0, 2**63 - 1)
    trace = trace_of(top.table("trace"), folder, seed)
    named = _model(top.table("model"))
    if model is None:
        model, resume = named, ResumePoints() if named.groups else None
    lanes = lanes_of(top.table("lanes"), folder)
    shared = {key: top.take(key) for key in ("tiers", "cost", "price")}
    machines = machines_of(top.take("machines", 1), shared, model, lanes, folder)
    count = sum(one.count for one in machines)
    table = top.table("manager")
    block_tokens = block_tokens_of(table, trace)
    remote = remote_of(top.take("remote"), lanes)
    if remote is not None:
        blocks = remote[0].room(model, block_tokens)
        machines = with_remote(machines, remote[0], blocks)
    manager = manager_of(table)
    engine = engine_of(top.table("engine"), count)
    more = {
        "machines": count,
        "clients": trace.clients,
        **engine,
        **router_of(top.table("router")),
        **directory_of(top.table("directory")),
        **transfer_of(top),
        **peers_of(top.table("peers"), engine["engine"]),
        "remote": remote and remote[1],
    }
    if (cost := manager.pop("cost", None)) is not None:
        machines = tuple(replace(one, cost=cost) for one in machines)
    goals = goals_of(top.table("goals"))
    top.close()
    first = machines[0]
    return SimulationConfig(
        trace,
        model,
        first.tiers,
        first.price,
        first.cost,
        seed,
        block_tokens,
        {**manager, **more, "resume": resume},
        goals,
        first.rent,
        resume,
        machines if machines[1:] else (),
    )


def _model(table: Table) -> ModelShape:
    """Return the model of a file, given by name or by the keys of a shape."""
    name = table.take("name")
    stated = table.some(*plain(ModelShape))
    table.close()
    if stated and (name is not None or "groups" in stated):
        raise ConfigError(
            f"model.name is {shown(name)}, and model has {', '.join(stated)}: a model with groups "
            "of layers is given by its name alone"
        )
    return made("model", ModelShape, stated) if name is None else model_named(name)
