"""Config: the settings of a simulation, from TOML and from KEY=VALUE.

Invariant: what comes back is checked, and an error names the key and the value; unknown keys are
refused. Cost: read once per run.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtrie.argument import few, flag, pairs, real, shown, text, whole, word
from kvtrie.cost import Cost
from kvtrie.errors import ConfigError
from kvtrie.shape import ModelShape
from kvtrie.tier import Lane, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

__all__ = ["Price", "SimulationConfig", "TraceSource", "read_config"]

Price: TypeAlias = "tuple[int, int] | list[tuple[int, int]]"
"""Parts of a nanosecond, 2**-32 each: `(base, slope)` or points `(context, price)`."""

_PART = 2**32
_MOST_NS = 2.0**31
_MOST_POINTS = 2**16 - 1
_MOST_TIERS = 16
_HASH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceSource:
    """The trace of a run.

    Attributes:
        path: the file.
        format: "tokens" or "mooncake".
        output: whether answers are made; without, a request ends with its first token.
        hash_tokens: tokens that a hash of a Mooncake trace stands for.
    """

    path: Path
    format: str = "tokens"
    output: bool = True
    hash_tokens: int = _HASH_TOKENS


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The settings of a run, checked.

    Attributes:
        trace: where requests come from.
        model: shape of the model on each machine.
        tiers: tiers of each machine, fastest first.
        price: what a token takes to compute.
        cost: what managers take that price for.
        seed: seed of whatever is drawn.
        block_tokens: real tokens of a block.
        manager: further arguments of `Simulation`, by name.
    """

    trace: TraceSource
    model: ModelShape
    tiers: tuple[Tier, ...]
    price: Price
    cost: Cost | str
    seed: int = 0
    block_tokens: int = 16
    manager: dict[str, Any] = field(default_factory=dict[str, Any])


def read_config(path: Path, changes: Iterable[str] = ()) -> SimulationConfig:
    """Read a file of settings.

    Args:
        path: a TOML file. A relative path of a trace in it starts at its folder.
        changes: `KEY=VALUE` each, with dots between keys and numbers for places in lists, as
            `tiers.0.blocks=9`; the value is TOML, or a word. They replace what the file says.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a value that cannot be.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the settings {path}: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    for change in changes:
        _change(document, change)
    return _config(document, path.parent)


def _change(document: dict[str, Any], change: str) -> None:
    """Put one `KEY=VALUE` into a document."""
    name, equals, given = change.partition("=")
    if not (name and equals):
        raise ConfigError(f"--set takes KEY=VALUE, not {change!r}")
    try:
        value: Any = tomllib.loads(f"value = {given}")["value"]
    except tomllib.TOMLDecodeError:
        value = given
    *above, last = name.split(".")
    here: Any = document
    for key in above:
        known, place = _place(here, key, change)
        here = known.setdefault(key, {}) if isinstance(known, dict) else known[place]
    known, place = _place(here, last, change)
    if isinstance(known, dict):
        known[last] = value
    else:
        known[place] = value


def _place(
    value: object, key: str, change: str
) -> tuple[dict[str, Any], int] | tuple[list[Any], int]:
    """A table, or a list and the place in it that a key names."""
    if isinstance(value, dict):
        return cast("dict[str, Any]", value), 0
    if not isinstance(value, list):
        raise ConfigError(f"--set {change}: {shown(value)} has no key {key}")
    items = cast("list[Any]", value)
    if not (key.isdecimal() and int(key) < len(items)):
        raise ConfigError(f"--set {change}: {key} is no place in a list of {len(items)}")
    return items, int(key)


class _Table:
    """A table of a document, whose keys are taken one by one."""

    def __init__(self, name: str, given: object) -> None:
        if not isinstance(given, dict):
            raise ConfigError(f"{name} is {shown(given)}, a table wanted")
        self._name = name
        self._left = dict(cast("dict[str, Any]", given))
        self._known: list[str] = []

    def take(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - any TOML value
        self._known.append(key)
        return self._left.pop(key, default)

    def key(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def number(self, key: str, default: int, low: int, high: int) -> int:
        return whole(self.key(key), self.take(key, default), low, high)

    def real(self, key: str, default: float, low: float, high: float) -> float:
        return real(self.key(key), self.take(key, default), low, high)

    def word(self, key: str, known: tuple[str, ...]) -> str:
        return word(self.key(key), self.take(key, known[0]), known)

    def table(self, key: str) -> _Table:
        return _Table(self.key(key), self.take(key, {}))

    def some(self, *keys: str) -> dict[str, Any]:
        """Those of some keys that are given."""
        present = {key: self._left[key] for key in keys if key in self._left}
        for key in keys:
            self.take(key)
        return present

    def close(self) -> None:
        """Refuse what was not taken."""
        for key, value in self._left.items():
            raise ConfigError(
                f"{self.key(key)} is {shown(value)}, but there is no such key: "
                f"{', '.join(sorted(self._known))}"
            )


def _made(name: str, make: Callable[..., Any], given: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """An object of a settings class, from keys that are its arguments."""
    try:
        return make(**given)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{name} lacks a key: {error}") from error


def _config(document: dict[str, Any], folder: Path) -> SimulationConfig:
    top = _Table("", document)
    seed = top.number("seed", 0, 0, 2**63 - 1)
    trace = _trace(top.table("trace"), folder)
    shape = top.table("model")
    model = _made("model", ModelShape, shape.some(*_plain(ModelShape, "groups")))
    shape.close()
    price, cost = _cost(top.table("cost"), model)
    more: dict[str, Any] = {"machines": top.number("machines", 1, 1, 2**20)}
    manager = top.table("manager")
    hashes = trace.format == "mooncake"
    block = manager.number("block_tokens", trace.hash_tokens if hashes else 16, 1, 2**31 - 1)
    if hashes and trace.hash_tokens % block:
        raise ConfigError(
            f"manager.block_tokens is {block}: {trace.hash_tokens} tokens of a hash are no whole "
            "number of such blocks"
        )
    more["keep"] = manager.number("keep", 1, 0, 2**31 - 1)
    more["load"] = manager.word("load", ("all", "plan", "none"))
    more["policy"] = text(manager.key("policy"), manager.take("policy", "lru"))
    more["structure"] = manager.word("structure", ("leaf-only", "holes"))
    more["drop_order"] = manager.word("drop_order", ("shallow", "seed"))
    more["reuse"] = flag(manager.key("reuse"), manager.take("reuse", True))  # noqa: FBT003
    more["epsilon"] = manager.real("epsilon", 1 / 64, 0, 1)
    stated = manager.take("cost")
    if isinstance(stated, str):
        cost = word(manager.key("cost"), stated, ("default", "seed"))
    elif stated is not None:
        own = _Table(manager.key("cost"), stated)
        cost = _made("manager.cost", Cost, own.some(*_plain(Cost)))
        own.close()
    manager.close()
    engine = top.table("engine")
    engine.word("kind", ("serial",))
    more["wait"] = engine.word("wait", ("all", "layer"))
    engine.close()
    router = top.table("router")
    more["router"] = router.word("kind", ("round-robin", "least-loaded", "hash"))
    router.close()
    more["transfer"] = top.word("transfer", ("executor", "predicted"))
    more["moves_per_job"] = top.number("moves_per_job", 64, 1, 2**31 - 1)
    more["peers"] = _peers(top.table("peers"))
    tiers = few("tiers", top.take("tiers", ()), _MOST_TIERS)
    if not tiers:
        raise ConfigError("tiers is (), one to four wanted")
    tiers = tuple(_tier(f"tiers.{at}", given) for at, given in enumerate(tiers))
    top.close()
    return SimulationConfig(trace, model, tiers, price, cost, seed, block, more)


def _plain(kind: type[Any], *but: str) -> tuple[str, ...]:
    """The names of a settings class that a table may have as keys."""
    return tuple(known.name for known in dataclasses.fields(kind) if known.name not in but)


def _trace(table: _Table, folder: Path) -> TraceSource:
    given = table.take("path")
    if not isinstance(given, str) or not given:
        raise ConfigError(f"trace.path is {shown(given)}, the name of a file wanted")
    path = folder / given
    source = TraceSource(
        path=path if path.exists() else Path(given),
        format=table.word("format", ("tokens", "mooncake")),
        output=flag("trace.output", table.take("output", True)),  # noqa: FBT003
        hash_tokens=table.number("hash_tokens", _HASH_TOKENS, 1, 2**31 - 1),
    )
    table.close()
    return source


def _cost(table: _Table, model: ModelShape) -> tuple[Price, Cost]:
    """What a token takes to compute, and the same for managers."""
    if table.word("kind", ("affine", "table")) == "affine":
        ns = table.real("ns_per_token", Cost.ns_of(model), 0, _MOST_NS)
        alpha = table.real("alpha", Cost().alpha, 0, _MOST_NS)
        table.close()
        slope = real("cost.alpha times cost.ns_per_token", ns * alpha, 0, _MOST_NS)
        return (round(ns * _PART), round(slope * _PART)), Cost(alpha=alpha, ns_per_token=ns)
    given = pairs("cost.points", table.take("points", ()), _MOST_POINTS)
    table.close()
    points = [
        (
            whole("context of cost.points", at, 0, 2**63 - 1),
            real("nanoseconds of cost.points", ns, 0, _MOST_NS),
        )
        for at, ns in given
    ]
    if not points:
        raise ConfigError("cost.points is (), pairs of context and nanoseconds per token wanted")
    cost = _made("cost.points", Cost, {"table": points, "ns_per_token": points[0][1]})
    return [(at, round(ns * _PART)) for at, ns in points], cost


def _peers(table: _Table) -> Lane | None:
    """The lane between two machines, if one fetches from another."""
    asks = table.word("lookup", ("own", "all")) == "all"
    stated = {"name": "peers", **table.some("bytes_per_s", "latency_ns", "shares")}
    table.close()
    if not asks:
        return None
    if "bytes_per_s" not in stated:
        raise ConfigError('peers.bytes_per_s is missing: lookup = "all" wants it')
    return _made("peers", Lane, stated)


def _tier(name: str, given: object) -> Tier:
    table = _Table(name, given)
    keys = _plain(Tier, "path", "second_path", "owner", "io_budget", "layout", "durability", "io")
    settings = table.some(*keys)
    table.close()
    kind = settings.get("kind")
    for way in ("read", "store"):
        if way in settings:
            lane = _Table(f"{name}.{way}", settings[way])
            stated = {"name": f"{kind} {way}", "bytes_per_s": None}
            stated |= lane.some("name", "bytes_per_s", "latency_ns", "shares")
            lane.close()
            settings[way] = _made(f"{name}.{way}", Lane, stated)
    return _made(name, Tier, {**settings, "owner": "none"})
