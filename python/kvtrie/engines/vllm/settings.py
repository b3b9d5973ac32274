"""Settings: the contents of `kv_connector_extra_config`, checked at the start of every process.

Invariant: an accepted setting has the same meaning in the scheduler's process and in each worker's.
An unknown key is an error. Cost: a file written and removed per folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from kvtrie import BlockManager
from kvtrie.engines.server.control import socket_path
from kvtrie.engines.server.tenant import SharingSettings
from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS
from kvtrie.settings.argument import flag, folder, instance, real, shown, whole, word
from kvtrie.settings.sizes import free_disk, free_memory, is_share, size
from kvtrie.settings.tier import DEFAULT_POLICY, Tier

__all__ = ["KEYS", "TIER_KEYS", "Settings"]

KEYS = (
    "tiers",
    "policy",
    "objective",
    "use_layerwise",
    "deadline_s",
    "lookup_s",
    "events",
    "why",
    "why_min_tokens",
    "why_per_second",
    "why_clients",
    "control",
    "calibration",
    "max_kl",
    "uncalibrated",
    "native_first",
    "native_last",
    "keep_versions",
    "share_after",
    "secret_file",
    "tenant_header",
)
"""Keys of the settings of a server."""

TIER_KEYS = (
    "kind",
    "blocks",
    "bytes",
    "path",
    "write",
    "admit_after",
    "free_low",
    "retained_share",
    "io_budget",
    "policy",
    "durability",
    "io",
    "keep",
    "keep_replace",
    "workers",
    "write_limit",
    "trust_s",
    "lookup",
    "secret_file",
    "format",
)
"""Keys of the settings of a tier."""

_SHARING = {"share_after", "secret_file", "tenant_header"}
_KINDS = ("host", "disk", "remote")
_ORDERS = (["host"], ["host", "disk"], ["host", "remote"], ["host", "disk", "remote"])
_TRACKED = 10_000_000  # blocks of a shared store
_DEADLINE_S = 30.0
_MOST_TOKENS, _MOST_PER_SECOND = 2**31, 10**6
_LOOKUP_S = 0.05
_MOST_VERSIONS = 1000
_MAX_KL = 1e-3
_NARROWER = {
    "native": ("int8", "fp8", "int4"),
    "int8": ("int4",),
    "fp8": ("int4",),
    "int4": (),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server, from `kv_connector_extra_config`.

    Attributes:
        tiers: the tiers below the GPU: a host tier, an optional disk tier, an optional remote tier.
            The configuration has the server's sizes, this field a rank's. None is a host tier with
            a quarter of the free memory.
        policy: the eviction policy.
        objective: the objective of value-based policies: the "cost" of recomputing blocks, or
            "hits".
        use_layerwise: whether each layer is loaded just before a step reads it. vLLM then uses
            piecewise CUDA graphs.
        deadline_s: the most seconds a request waits for blocks from disk or a shared store before
            they are a miss, and the most seconds of a copy from or to them.
        lookup_s: the most seconds a request waits for the answer of a shared store about its
            blocks, within `deadline_s`.
        events: whether KV events of host and disk are published with vLLM's own
            (`--kv-events-config`).
        why: whether computed prompt tokens are counted by cause. Every policy then remembers
            evicted blocks, in 8 bytes per block.
        why_min_tokens: the least computed tokens for comparing the rest of a prompt with cached
            branches.
        why_per_second: the most compared requests per second, 0 to compare only on request.
        why_clients: whether a client may ask for a miss report. The report follows only from its
            own prompt and the number of tokens found. The request is then also compared with
            cached branches, for the control socket.
        control: path of a unix socket for `kvtrie ctl` and `kvtrie why`, or None. With data
            parallelism each rank appends its number, `NAME-1.sock`, or replaces `{rank}` by it.
        format: number format of the tiers below the GPU, "native", "int8", "fp8" or "int4", set in
            the host tier. A disk may have fewer bits, a remote tier has the same format. Any format
            except "native" changes answers.
        calibration: path of the `calibration.json` written by `kvtrie calibrate` for these weights.
            A format is refused without it.
        max_kl: the highest accepted mean KL of next tokens, in nats.
        uncalibrated: whether a format is used regardless of `calibration` and `max_kl`.
        native_first: tokens at the start of a prompt stored in the model's format in all tiers:
            attention sinks. Each of their blocks takes several slots.
        native_last: tokens at the end of a prompt, computed instead of loaded, and so in the
            model's format.
        keep_versions: the number of older weights with blocks kept after an update. Their blocks
            are evicted first, and found again if their weights return.
        sharing: the rules for sharing between tenants.
    """

    tiers: tuple[Tier, ...] | None = None
    policy: str = DEFAULT_POLICY
    objective: Literal["cost", "balanced", "hits"] = "cost"
    use_layerwise: bool = False
    deadline_s: float = _DEADLINE_S
    lookup_s: float = _LOOKUP_S
    events: bool = False
    why: bool = True
    why_min_tokens: int = 1024
    why_per_second: int = 20
    why_clients: bool = False
    control: str | None = None
    format: str = "native"
    calibration: str | None = None
    max_kl: float = _MAX_KL
    uncalibrated: bool = False
    native_first: int = 0
    native_last: int = 0
    keep_versions: int = 1
    sharing: SharingSettings = field(default_factory=SharingSettings)

    @classmethod
    def read(cls, extra: Mapping[str, Any] | None, *, ranks: int = 1, part: str = "") -> Settings:
        """Return the settings of a configuration, with defaults for missing keys.

        Args:
            extra: the configuration.
            ranks: the number of processes sharing the sizes of the server's tiers.
            part: this data-parallel rank's folder below a disk's path, and suffix of the name of
                kept memory, or "" for a single rank.

        Raises:
            ConfigError: an unknown key or word, a number out of range, tiers out of order, an
                unwritable folder, or an unreadable secret.
        """
        instance("kv_connector_extra_config", extra or {}, Mapping)
        given = dict(extra or {})
        _check_keys("kv_connector_extra_config", given, KEYS)
        words = {
            "policy": tuple(BlockManager.policies()),
            "objective": ("cost", "balanced", "hits"),
        }
        for name in words.keys() & given.keys():
            word(name, given[name], words[name])
        for name in ("use_layerwise", "events", "why", "why_clients", "uncalibrated"):
            if name in given:
                flag(name, given[name])
        for name in ("deadline_s", "lookup_s"):
            if name in given:
                given[name] = real(name, given[name], 1e-3, 1e6)
        if "keep_versions" in given:
            given["keep_versions"] = whole(
                "keep_versions", given["keep_versions"], 1, _MOST_VERSIONS
            )
        given |= _observed(given) | _calibrated(given)
        sharing = {name: given.pop(name) for name in _SHARING & given.keys()}
        given["sharing"] = SharingSettings.read(sharing)
        if "tiers" in given:
            given["tiers"], formats = _tiers(given["tiers"], ranks, part)
            given["format"] = formats[0]
        settings = cls(**given)
        settings._check_native_first()
        return settings

    @property
    def disk_format(self) -> str:
        """Number format of the disk tier, possibly with fewer bits."""
        layouts = [tier.layout for tier in self.tiers or () if tier.kind == "disk"]
        return next((name for name, each in FORMATS.items() if each in layouts), self.format)

    def _check_native_first(self) -> None:
        """Raise unless all tiers can store the first blocks in the model's format."""
        if not self.native_first:
            return
        first = f"native_first is {self.native_first}"
        if self.format == self.disk_format == "native":
            raise ConfigError(f"{first} and no tier has a format: leave native_first out")
        if self.format != self.disk_format:
            raise ConfigError(
                f"{first}, which needs one format in all tiers: that of host memory is "
                f"{self.format!r} and that of the disk {self.disk_format!r}"
            )
        if self.events:
            raise ConfigError(
                f"{first} and events is true: an event names a whole block of vLLM's, and the "
                "first blocks are kept in parts; leave one of them out"
            )


def _observed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked settings of causes and of the control socket."""
    most = {"why_min_tokens": _MOST_TOKENS, "why_per_second": _MOST_PER_SECOND}
    read = {name: whole(name, given[name], 0, most[name]) for name in most.keys() & given.keys()}
    if given.get("control") is None:
        return read
    return {**read, "control": socket_path("control", given["control"])}


def _calibrated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked settings of a format's cost."""
    read: dict[str, Any] = {}
    if "max_kl" in given:
        read["max_kl"] = real("max_kl", given["max_kl"], 0, 1e6)
    for name in {"native_first", "native_last"} & given.keys():
        read[name] = whole(name, given[name], 0, _MOST_TOKENS)
    if given.get("calibration") is not None:
        read["calibration"] = folder("calibration", given["calibration"])
    return read


def _check_keys(what: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    unknown = [shown(key) for key in given if key not in keys]
    if unknown:
        raise ConfigError(f"{what} has no {', '.join(unknown)}: {', '.join(keys)} are allowed")


def _tiers(given: object, ranks: int, part: str) -> tuple[tuple[Tier, ...], list[str]]:
    """Return the tiers and the format of each."""
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(
            f"tiers are {shown(cast('object', given))}, a list of at least one tier wanted"
        )
    rows = cast("list[object]", list(cast("Any", given)))
    tiers: list[Tier] = []
    formats: list[str] = []
    for at, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"tier {at} is {shown(row)}, an object wanted")
        last = at == len(rows) - 1
        fields = dict(cast("Mapping[str, Any]", row))
        _check_keys(f"tier {at}", fields, TIER_KEYS)
        formats.append(_format(at, fields, formats))
        tiers.append(_tier(at, fields, ranks, part, last=last))
    order = [tier.kind for tier in tiers]
    if order not in _ORDERS:
        raise ConfigError(f"tiers are {order}: one of {', '.join(map(str, _ORDERS))} wanted")
    return tuple(tiers), formats


def _format(at: int, row: dict[str, Any], above: list[str]) -> str:
    """Return the format of a tier, and set its layout in the row."""
    name = row.pop("format", above[0] if above else "native")
    word(f"format of tier {at}", name, tuple(FORMATS))
    disk = row.get("kind") == "disk"
    if above and name != above[0] and not (disk and name in _NARROWER[above[0]]):
        able = ", ".join((above[0], *(_NARROWER[above[0]] if disk else ())))
        raise ConfigError(
            f"format of tier {at} is {name!r} and that of tier 0 {above[0]!r}: {able} wanted; a "
            "disk may use the format of host memory or fewer bits, other tiers use that of tier 0"
        )
    if FORMATS[name] is not None:
        row["layout"] = FORMATS[name]
    return name


def _tier(at: int, row: dict[str, Any], ranks: int, part: str, *, last: bool) -> Tier:
    word(f"kind of tier {at}", row.get("kind"), _KINDS)
    if not last:
        row.setdefault("write", "through")
    remote = row["kind"] == "remote"
    _put_parts(at, row, part)
    if row.get("keep") is not None and is_share(row.get("bytes")):
        Tier(**row)  # refuses it, with the reason
    if row.get("bytes") is not None:
        row["bytes"] = size(f"bytes of tier {at}", row["bytes"], ranks, of=_free(row)) // ranks
    elif remote:
        row.setdefault("blocks", _TRACKED)
    if row.get("write_limit") is not None:
        row["write_limit"] = size(f"write_limit of tier {at}", row["write_limit"], ranks) // ranks
    tier = Tier(**row)
    if tier.kind != "host" and tier.path is None:
        needed = "the URL of its store" if remote else "the folder of its files"
        raise ConfigError(f"a {tier.kind} tier needs a path, {needed}")
    if remote:
        _check_store(tier)
    elif tier.path is not None:
        _writable(tier.path)
    return tier


def _put_parts(at: int, row: dict[str, Any], part: str) -> None:
    """Change the paths of a tier into paths of a data-parallel rank."""
    if row.get("path") is not None and row["kind"] != "remote":
        row["path"] = str(Path(folder(f"path of tier {at}", row["path"]), part))
    if part and row.get("keep") is not None:
        row["keep"] = f"{folder(f'keep of tier {at}', row['keep'])}-{part}"


def _check_store(tier: Tier) -> None:
    """Raise for an unreadable URL or secret. The workers open the store."""
    from kvtrie.tiers.remote.open import read_secret
    from kvtrie.tiers.remote.url import RemoteUrl

    RemoteUrl.parse("path of tier 'remote'", tier.path)
    read_secret(tier.secret_file)


def _free(row: Mapping[str, Any]) -> Callable[[], int] | None:
    """Return the function for the free bytes to take a percentage of, or None."""
    if row["kind"] == "host":
        return free_memory
    path = row.get("path")
    return None if path is None or row["kind"] != "disk" else lambda: free_disk(path)


def _writable(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} of a disk tier cannot be written: {error}"
        ) from error
