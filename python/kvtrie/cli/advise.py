"""`kvtrie advise`: predicts the gain of host memory and a disk for a server without kvtrie."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.cli.advice_text import advice_text
from kvtrie.cli.output_file import output_file
from kvtrie.cli.progress import watched
from kvtrie.errors import ConfigError
from kvtrie.settings.sizes import size
from kvtrie.settings.tier import Lane, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie.advise.advice import Advice, Question
    from kvtrie.advise.groups import Grouping
    from kvtrie.advise.window import Window
    from kvtrie.model.shape import ModelShape
    from kvtrie.sim.passes import Passes
    from kvtrie.sim.trace import TraceRequest

__all__ = ["COMMAND"]

_SOCKETS = ("tcp://", "ipc://")
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|min|h)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}
_DEFAULT_SPAN = 600.0
_DAY_S = 86_400.0
_GIB = 2**30


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="tcp://HOST:PORT or ipc://PATH of a server's KV events, a recording, or a trace",
    )
    add("--metrics", metavar="URL", help="the server's metrics, as http://HOST:8000/metrics")
    add("--replay", metavar="URL", help="the server's replay endpoint, to start with its history")
    add(
        "--for",
        dest="span",
        type=_span,
        default=_DEFAULT_SPAN,
        metavar="TIME",
        help="how long to listen, as 30s, 10m or 24h (default: 10m). Ctrl-C ends it sooner",
    )
    add("--record", type=Path, metavar="FILE", help="write the events to a new file, mode 0600")
    add(
        "--keep-tokens",
        action="store_true",
        help="with --record: token ids and names as the server sends them, not digests: the file "
        "then holds the users' prompts",
    )
    _setting_arguments(parser)
    add("--plot", type=output_file, metavar="FILE", help="draw the share found over host memory")
    add("--json", action="store_true", help="print a JSON document")
    parser.set_defaults(run=_run)


def _setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the sizes and policies to compare, and the format of a trace."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model's folder, for its shape and its groups of layers, or a model name of "
        "`kvtrie replay --model`",
    )
    model.add_argument(
        "--bytes-per-token", type=int, metavar="N", help="bytes of KV of a token, of all ranks"
    )
    add("--gpu", metavar="SIZE", help="the engine's KV cache (default: its size in the metrics)")
    add(
        "--host",
        metavar="SIZE,SIZE",
        help="sizes of host memory (default: the GPU cache's, doubled until all blocks fit)",
    )
    add(
        "--disk",
        metavar="SIZE",
        help="a disk to combine with each size, 0 for none (default: room for all blocks)",
    )
    add(
        "--policy",
        default="lru,learned",
        metavar="NAME,NAME",
        help="policies of host and disk (default: %(default)s)",
    )
    add(
        "--link",
        metavar="FILE",
        help="the file of `kvtrie profile`, with the times of prefills if it has a model's, or the "
        "bytes per second from host to GPU, as 25GB",
    )
    add(
        "--format",
        default="mooncake",
        metavar="NAME",
        help="of a trace: mooncake, tokens, azure, burstgpt or sharegpt (default: %(default)s)",
    )
    add(
        "--block-tokens",
        type=int,
        default=512,
        metavar="N",
        help="of a trace: tokens per hash (default: %(default)s)",
    )


def _span(text: str) -> float:
    """Return the seconds of a time with a unit."""
    found = _SPAN.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= _DAY_S:
        raise argparse.ArgumentTypeError(f"30s, 10m or at most 24h wanted, not {text!r}")
    return seconds


def _run(given: argparse.Namespace) -> int:
    try:
        from kvtrie.advise import advice, breakers, groups, rebuild, recording, window
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; advise needs: pip install 'kvtrie[advise]'"
        ) from error
    model = _model(given)
    live = _is_live(given)
    seen: Window | None = None
    if live or recording.is_recording(Path(given.source)):
        seen = window.Window(rebuild.Rebuilt(keep_tokens=given.keep_tokens or not live))
        if live:
            _listen(given, seen)
        else:
            seen.add_all(recording.read_recording(Path(given.source)))
        rebuilt = seen.rebuilt
        played = groups.Grouping(model, rebuilt.size)
        if given.bytes_per_token is None:
            played = groups.grouping(model, seen.groups, rebuilt.size)

        def requests() -> Iterable[TraceRequest]:
            return played.requests(rebuilt.requests())
    else:
        trace, played = _trace(given), groups.of_trace(model, given.block_tokens)

        def requests() -> Iterable[TraceRequest]:
            return trace

    question = _question(given, played, seen)
    answer = advice.advise(
        requests, question, lambda some: watched(some, "Playing", quiet=given.json)
    )
    top = None if seen is None else breakers.top_breakers(seen.rebuilt)
    if given.plot is not None:
        _draw(given, answer)
    if given.json:
        document = {
            "source": given.source,
            "block_tokens": played.block_tokens,
            "gpu_bytes": question.gpu,
            "shares_of": "all requests" if question.traffic else "rebuilt requests",
            "coverage": question.coverage,
            **(_facts(seen) if seen is not None else {}),
            **dataclasses.asdict(answer),
            "breakers": None if top is None else [dataclasses.asdict(one) for one in top],
        }
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write(advice_text(answer, question, seen, top, played))
    return 0


def _is_live(given: argparse.Namespace) -> bool:
    """Return whether the source is a server.

    Raises:
        ConfigError: an option unsuitable for the source.
    """
    live: bool = given.source.startswith(_SOCKETS)
    for name in ("metrics", "replay", "record"):
        if getattr(given, name) is not None and not live:
            raise ConfigError(f"--{name} goes with a server's endpoint, not with a file")
    if given.keep_tokens and given.record is None:
        raise ConfigError("--keep-tokens goes with --record")
    return live


def _draw(given: argparse.Namespace, answer: Advice) -> None:
    from kvtrie.sim.pictures import draw_advice

    lines: dict[str, list[tuple[float, float]]] = {}
    for row in answer.rows:
        name = f"{row.policy}, with disk" if row.disk else row.policy
        lines.setdefault(name, []).append((row.host / _GIB, row.gpu + row.found))
    draw_advice(given.plot, Path(given.source).name, lines, answer.gpu, answer.most)


def _facts(seen: Window) -> dict[str, Any]:
    """Return counts of a window, for JSON."""
    rebuilt = seen.rebuilt
    return {
        "blocks_stored": rebuilt.stored,
        "blocks_distinct": rebuilt.distinct,
        "unknown_parents": rebuilt.unknown,
        "cleared": rebuilt.cleared,
        "lost": rebuilt.lost,
        "forgotten_requests": rebuilt.forgotten,
        "events_of_other_groups": seen.groups.events,
        "groups": [str(one) for one in seen.groups.several()],
    }


def _model(given: argparse.Namespace) -> ModelShape:
    """Return a shape with the bytes of a token.

    Raises:
        ConfigError: neither of the two options, or a folder refused by `folder_shape`.
    """
    from kvtrie.advise.model_folder import folder_shape
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.argument import whole
    from kvtrie.sim.models import MODELS, model_named

    if given.bytes_per_token is not None:
        count = whole("--bytes-per-token", given.bytes_per_token, 4, 2**32)
        if count % 4:
            raise ConfigError(f"--bytes-per-token is {count}, a multiple of 4 wanted")
        return ModelShape(layers=1, kv_heads=1, head_dim=count // 4, dtype="bfloat16")
    if given.model is None:
        raise ConfigError("--model DIR or --bytes-per-token N wanted: sizes are bytes")
    if str(given.model) in MODELS and not given.model.is_dir():
        return model_named(str(given.model))
    return folder_shape(given.model)


def _trace(given: argparse.Namespace) -> list[TraceRequest]:
    from kvtrie.settings.argument import word
    from kvtrie.sim.config.trace import FORMATS, TraceSource
    from kvtrie.sim.requests import block_requests

    word("--format", given.format, FORMATS)
    source = TraceSource(Path(given.source), given.format, hash_tokens=given.block_tokens)
    return list(block_requests(source, given.block_tokens))


def _listen(given: argparse.Namespace, seen: Window) -> None:
    """Fill a window from a server, and record it."""
    from kvtrie.advise.listen import listening
    from kvtrie.advise.recording import Recorder
    from kvtrie.advise.server_metrics import scrape

    recorder = Recorder(given.record, keep_tokens=given.keep_tokens) if given.record else None

    def note_counters() -> None:
        if given.metrics is not None:
            counters = scrape(given.metrics)
            seen.add(counters)
            if recorder is not None:
                recorder.metrics(counters)

    try:
        with listening(given.source, given.replay) as listener:
            try:
                for stage in (listener.history(), listener.live(given.span)):
                    for batch in stage:
                        seen.add(batch)
                        if recorder is not None:
                            recorder.batch(batch)
                    note_counters()
            except KeyboardInterrupt:
                sys.stderr.write("Stopped listening.\n")
                note_counters()
    finally:
        if recorder is not None:
            recorder.close()
    seen.check()


def _question(given: argparse.Namespace, played: Grouping, seen: Window | None) -> Question:
    from kvtrie.advise.advice import Question
    from kvtrie.advise.tier_bytes import TierBytes

    sizes = TierBytes.of(played.model, played.block_tokens, played.resume)
    gpu = size("--gpu", given.gpu) if given.gpu is not None else None
    if gpu is None and seen is not None:
        gpu = seen.gpu_bytes(played) or seen.resident_bytes(played)
    if not gpu or gpu < sizes.least:
        raise ConfigError(
            f"--gpu SIZE wanted, at least a block of {sizes.least} bytes: the size of the engine's "
            f"KV cache"
        )
    traffic = seen.traffic() if seen is not None else None
    disk = None
    if given.disk is not None:
        disk = 0 if given.disk == "0" else size("--disk", given.disk)
    hosts: list[str] = [] if given.host is None else given.host.split(",")
    return Question(
        played.model,
        played.block_tokens,
        sizes.rounded(gpu),
        sorted({size("--host", one) for one in hosts}),
        disk,
        tuple(given.policy.split(",")),
        _lanes(given.link),
        traffic,
        1.0 if seen is None else seen.coverage(traffic),
        played.resume,
        _passes(given.link),
    )


def _passes(link: str | None) -> Passes | None:
    """Return the step times of a model in a file of `kvtrie profile`, or None."""
    from kvtrie.input import read_text, toml_of
    from kvtrie.sim.passes import read_passes

    if link is None or not (path := Path(link)).is_file():
        return None
    has = "passes" in toml_of(read_text(path, "the profile"), f"{path} is no profile")
    return read_passes(path) if has else None


def _lanes(link: str | None) -> tuple[Lane, Lane]:
    """Return the lanes for loads from host and from disk."""
    from kvtrie.sim.config.lanes import lanes_of
    from kvtrie.sim.config.table import Table

    host = Tier("host", blocks=1).lanes()[0]
    disk = Tier("disk", blocks=1).lanes()[0]
    if link is None:
        return host, disk
    if Path(link).is_file():
        lanes = lanes_of(Table("--link", {"path": link}))
        return lanes.get("host read", host), lanes.get("disk read", disk)
    speed = size("--link", link)
    return dataclasses.replace(host, bytes_per_s=float(speed)), disk


COMMAND = ("what host memory and disk would bring to a server without kvtrie", _arguments)
"""Help text of the command, and its function for arguments."""
