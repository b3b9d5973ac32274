"""`kvtrie profile`: measures this machine for managers, lanes and simulators."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.output_file import output_file
from kvtrie.errors import ConfigError, TransferError
from kvtrie.output import write_output

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rich.console import Console

    from kvtrie.model.shape import ModelShape

__all__ = ["COMMAND", "profile_text"]

_REQUESTS = (1, 4, 8)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="demo",
        metavar="MODEL",
        help="model to time: demo, tiny, none, or the folder of a causal language model",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="time the steps of this idle vLLM or SGLang server, in the place of a model's passes",
    )
    parser.add_argument(
        "--block-tokens", type=int, default=16, metavar="N", help="tokens per block (default: 16)"
    )
    parser.add_argument(
        "--longest", type=int, default=4096, metavar="N", help="longest context (default: 4096)"
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="runs per number")
    parser.add_argument("--blocks", type=int, default=64, metavar="N", help="blocks of a copy")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="measure the disk there, too")
    parser.add_argument(
        "--remote", metavar="URL", help="measure a shared store too, as `kvtrie remote check` does"
    )
    parser.add_argument(
        "--out",
        type=output_file,
        default=Path("kvtrie.toml"),
        metavar="FILE",
        help="file to write it to",
    )
    parser.add_argument("--json", action="store_true", help="print the same as a JSON document")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    if min(given.repeats, given.longest, given.block_tokens, given.blocks) < 1:
        raise ConfigError(
            f"repeats {given.repeats}, longest {given.longest}, block tokens "
            f"{given.block_tokens}, blocks {given.blocks}: at least 1 wanted, and 2 repeats"
        )
    try:
        from rich.console import Console
        from rich.progress import Progress

        from kvtrie.transfer import timed_copies
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; profiling needs: pip install 'kvtrie[hf,cli]'"
        ) from error
    assert timed_copies  # noqa: S101 - imported to report a missing package early
    with Progress(console=Console(stderr=True), disable=given.json, transient=True) as bar:
        task = bar.add_task("Profiling", total=None)

        def on_step(what: str) -> None:
            bar.update(task, description=what, advance=1)

        measured = measure(given, on_step)
    write_output(given.out, profile_text(measured))
    text = (
        json.dumps(measured) + "\n"
        if given.json
        else profile_text(measured) + f"\nWritten to {given.out}.\n"
    )
    sys.stdout.write(text)
    return 0


def measure(given: argparse.Namespace, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Return all requested measurements, in the structure of the file."""
    from kvtrie.engines.transformers.timed_passes import time_device
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.tier import Tier
    from kvtrie.tiers import DiskStorage, gpu_pool, host_pool
    from kvtrie.transfer.timed_copies import time_lane

    measured: dict[str, Any] = {"model": given.model, "block_tokens": given.block_tokens}
    shape = ModelShape(layers=30, kv_heads=3, head_dim=64, fingerprint="profile")
    if given.server is not None:
        measured["model"], steps = _served(given, on_step)
        measured |= steps
    elif given.model != "none":
        shape, steps = _loaded(given, on_step)
        measured |= steps
    on_step("Device")
    device = time_device(shape.dtype, repeats=given.repeats)
    measured["compute"] = {name: round(value) for name, value in device._asdict().items()}
    host = Tier("host", blocks=given.blocks)
    fast = gpu_pool(shape, Tier("gpu", blocks=given.blocks), given.block_tokens)
    below = host_pool(shape, host, given.block_tokens)
    pairs: list[tuple[Any, Any, Tier]] = [(fast, below, host)]
    if given.disk is not None:
        given.disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.disk) as folder:
        if given.disk is not None:
            disk = Tier("disk", blocks=given.blocks, path=folder)
            pairs.append((below, DiskStorage.of_tier(shape, disk, given.block_tokens), disk))
        lanes: dict[str, Any] = {}
        both: dict[str, float] = {}
        for upper, lower, tier in pairs:
            for name, figures in time_lane(upper, lower, tier, repeats=given.repeats):
                on_step(f"Copies: {tier.kind}")
                if name == "both":
                    both[tier.kind] = figures
                else:
                    lanes[name] = figures
    measured["device"] = fast.device.type
    measured["lanes"] = lanes | _remote(given.remote, on_step)
    measured["both"] = both
    return measured


def _loaded(
    given: argparse.Namespace, on_step: Callable[[str], None]
) -> tuple[ModelShape, dict[str, Any]]:
    """Return the shape of a model in this process, and the times of its passes."""
    from rich.console import Console

    from kvtrie.engines.transformers.timed_passes import time_prefill
    from kvtrie.model.shape import ModelShape

    model = _model(given.model, Console(stderr=True, quiet=given.json))
    contexts = [0]
    while 2 * max(1, contexts[-1]) <= given.longest:
        contexts.append(max(given.block_tokens, 2 * contexts[-1]))
    rows: list[list[float]] = []
    spreads: list[float] = []
    on_step(f"Prefill behind {contexts[0]} tokens")
    timings = time_prefill(model, given.block_tokens, contexts, repeats=given.repeats)
    for context, timing in timings:
        on_step(f"Prefill behind {2 * context or given.block_tokens} tokens")
        # Longer contexts cost no less: a decrease is noise.
        rows.append([context, max(timing.median, rows[-1][1] if rows else 0.0)])
        spreads.append(round(timing.spread / timing.median, 4))
    table = [[int(at), round(ns / rows[0][1], 6)] for at, ns in rows]
    return ModelShape.from_config(model.config, fingerprint="profile"), {
        "cost": {"ns_per_token": round(rows[0][1], 1), "table": table, "spread": spreads},
        "passes": _passes(model, given.longest, given.repeats, on_step),
        "decode": _decodes(model, given.longest, given.repeats, on_step),
    }


def _served(
    given: argparse.Namespace, on_step: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """Return the name of a served model, and the times of its engine's steps."""
    from kvtrie.sim.completions import Server
    from kvtrie.sim.server_profile import profile_server

    server = Server(given.server)
    try:
        steps = profile_server(
            server, longest=given.longest, repeats=given.repeats, on_step=on_step
        )
    except TransferError as error:
        raise ConfigError(f"--server: {error}") from error
    return server.model, steps


def _remote(given: str | None, on_step: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Return the lanes of a shared store, none without a URL."""
    from kvtrie.tiers.remote.check import check_store
    from kvtrie.tiers.remote.url import RemoteUrl

    if given is None:
        return {}
    url = RemoteUrl.parse("--remote", given)
    try:
        report = check_store(url, on_step=lambda what: on_step(f"{url.scheme}: {what}"))
    except TransferError as error:
        raise ConfigError(f"{url} is unreachable: {error}") from error
    failed = [f"{step.name}: {step.detail}" for step in report.steps if not step.ok]
    if failed:
        raise ConfigError(f"{url} does not do what a shared store needs: {'; '.join(failed)}")
    return report.lanes()


def _model(name: str, console: Console) -> Any:  # noqa: ANN401 - a transformers model
    """Return the model by name or folder."""
    from kvtrie.demo.model import from_folder, smollm, tiny

    if name in {"tiny", "demo"}:
        return (tiny() if name == "tiny" else smollm(console)).model
    return from_folder(Path(name))


def _passes(
    model: Any,  # noqa: ANN401 - a transformers model
    longest: int,
    repeats: int,
    on_step: Callable[[str], None],
) -> dict[str, Any]:
    """Time passes of 1 token to a quarter of the longest context, after none and half of it."""
    from kvtrie.engines.transformers.timed_passes import time_passes
    from kvtrie.fuse.passes import PassTable

    tokens = [1]
    while 4 * tokens[-1] <= max(4, longest // 4):
        tokens.append(4 * tokens[-1])
    cells: list[tuple[int, int, float]] = []
    for context, many, ns in time_passes(model, [0, longest // 2], tokens, repeats=repeats):
        on_step(f"Passes of {many} tokens behind {context}")
        cells.append((context, many, round(ns)))
    table = PassTable.of(cells)
    return {"contexts": table.contexts, "tokens": table.tokens, "ns": table.ns}


def _decodes(
    model: Any,  # noqa: ANN401 - a transformers model
    longest: int,
    repeats: int,
    on_step: Callable[[str], None],
) -> dict[str, Any]:
    """Time a token each of up to eight requests, after none and half of the longest context."""
    from kvtrie.engines.transformers.timed_passes import time_decodes
    from kvtrie.fuse.passes import PassTable

    cells: list[tuple[int, int, float]] = []
    for context, many, ns in time_decodes(model, [0, longest // 2], _REQUESTS, repeats=repeats):
        on_step(f"Decodes of {many} requests behind {context}")
        cells.append((context, many, round(ns)))
    table = PassTable.of(cells)
    return {"contexts": table.contexts, "requests": table.tokens, "ns": table.ns}


def profile_text(measured: dict[str, Any]) -> str:
    """Return a profile as TOML.

    Plain values first, then a table for each dictionary. Strings and numbers are as in JSON.
    """
    text = ""
    tables: list[tuple[str, Any]] = []
    for name, value in measured.items():
        if name == "lanes":
            tables += [(f'lanes."{lane}"', figures) for lane, figures in value.items()]
        elif name in {"cost", "passes", "decode", "server", "compute", "both"}:
            tables.append((name, value))
        else:
            text += f"{name} = {json.dumps(value)}\n"
    for name, table in tables:
        text += f"\n[{name}]\n"
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    return text


COMMAND = ("measure this machine: prefill over context, and every lane's speed", _arguments)
"""Help text of the command, and its function for arguments."""
