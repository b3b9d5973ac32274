"""SimulationConfig: all settings of a run.

Invariant: what comes back is checked, and an error names the key and the value; unknown keys are
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
    """The settings of a run, checked.

    Attributes:
        trace: where requests come from.
        model: shape of the model on each machine.
        tiers: tiers of each machine, fastest first; with a table `remote` that store is the last.
        price: what a token takes to compute.
        cost: what managers take that price for.
        seed: seed of whatever is drawn.
        block_tokens: real tokens of a block.
        manager: further arguments of `Simulation`, by name.
        goals: what a request must meet to count as goodput.
        rent: what machines cost per hour.
        resume: which borders stay resumable where groups of layers are kept apart; None keeps all
            tokens of all layers.
        machines: machines that differ in tiers, price, cost or rent, which are those of the first
            one above; empty if all are alike.
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
    def alike(self) -> tuple[Machines, ...]:
        """All machines, those that are alike together."""
        count: int = self.manager.get("machines", 1)
        one = Machines(count, self.tiers, self.price, self.cost, self.rent)
        return self.machines or (one,)

    @property
    def most_blocks(self) -> int:
        """The most blocks of a prompt that a trace may claim."""
        return max(MOST_BLOCKS, *(self.room(tier) for one in self.alike for tier in one.tiers))

    @property
    def shared(self) -> Tier | None:
        """The last tier, if it is one store of all machines."""
        return self.tiers[-1] if self.manager.get("remote") is not None else None

    def rooms(self) -> list[int]:
        """Return the room of each tier in blocks, over all machines."""
        rows = [[number * self.room(tier) for tier, number in row] for _, row in self._numbers()]
        return [sum(column) for column in zip(*rows, strict=True)]

    def room_bytes(self) -> int:
        """Return the bytes of all tiers of all machines, padding counted."""
        return sum(
            number * tier.room_bytes(self.model, self.block_tokens)
            for _, row in self._numbers()
            for tier, number in row
        )

    def per_hour(self) -> float | None:
        """Return what all machines cost per hour; None if no price is given.

        A store of all machines has the price of the first of them.
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
        """Machines that are alike, and how many there are of each of their tiers."""
        for at, one in enumerate(self.alike):
            row = [(tier, one.count) for tier in one.tiers]
            if self.shared is not None:
                row[-1] = (one.tiers[-1], int(at == 0))
            yield one, row

    def room(self, tier: Tier) -> int:
        """Return the room of a tier in blocks; of the first group, where groups are kept apart.

        Args:
            tier: one of `tiers`.

        Raises:
            ConfigError: as of `Tier.room`.
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
    """Read a file of settings.

    Args:
        path: a TOML file. A relative path of a trace in it starts at its folder.
        changes: `KEY=VALUE` each, with dots between keys and numbers for places in lists, as
            `tiers.0.blocks=9`; the value is TOML, or a word. They replace what the file says.
        model: takes the place of the file's.
        resume: which borders stay resumable where its groups of layers are kept apart.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a value that cannot be.
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
        document: the tables, as `tomllib` reads them.
        folder: where a relative path of a trace starts.
        model: takes the place of the document's.
        resume: as for `read_config`.

    Raises:
        ConfigError: an unknown key, a value that cannot be.
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
    """The model of a file: by its name, or by the keys of a shape."""
    name = table.take("name")
    stated = table.some(*plain(ModelShape))
    table.close()
    if stated and (name is not None or "groups" in stated):
        raise ConfigError(
            f"model.name is {shown(name)}, and model has {', '.join(stated)}: a model with groups "
            "of layers is given by its name alone"
        )
    return made("model", ModelShape, stated) if name is None else model_named(name)
