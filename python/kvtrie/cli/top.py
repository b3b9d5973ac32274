"""`kvtrie top`: a live table of managers, for a replay in this process or a running engine.

Invariant: it only reads, and reads both sources through the same metrics. Cost: some milliseconds
per refresh.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from kvtrie.cli.output_file import output_file
from kvtrie.cli.replay import add_model, add_tiers, model_of
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvtrie.cli.scrape import Scrape
    from kvtrie.cli.view import View
    from kvtrie.metrics import Collector
    from kvtrie.sim.trace import TraceRequest

__all__ = ["COMMAND", "Pace", "watch"]

_NS = 1e9
_PATIENCE_S = 10.0
_NEEDS = "pip install 'kvtrie[cli,metrics]'"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="address of an engine's metrics for Prometheus",
    )
    parser.add_argument(
        "--replay",
        metavar="TRACE",
        help="play a trace instead, as `kvtrie replay` does: a file, or a synthetic trace: chats, "
        "agents, shared or flood",
    )
    add_tiers(parser)
    add_model(parser)
    parser.add_argument(
        "--speed",
        type=_positive,
        metavar="N",
        help="play N seconds of the trace per second (default: as fast as it goes)",
    )
    parser.add_argument(
        "--refresh",
        type=_positive,
        default=0.5,
        metavar="SECONDS",
        help="time between two looks (default: %(default)s)",
    )
    parser.add_argument("--for", type=_positive, dest="length", metavar="SECONDS", help="end then")
    parser.add_argument("--json", action="store_true", help="print a JSON line per refresh")
    parser.add_argument(
        "--svg", type=output_file, metavar="FILE", help="save the last screen as SVG"
    )
    parser.set_defaults(run=_run)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 wanted, not {text!r}")
    return number


def _run(given: argparse.Namespace) -> int:
    if (given.url is None) == (given.replay is None):
        raise ConfigError("one of URL and --replay wanted")
    try:
        from kvtrie.cli.scrape import Scrape
        from kvtrie.cli.screen import save_picture
        from kvtrie.metrics import Collector
    except ImportError as error:
        raise ConfigError(f"{error}; top needs: {_NEEDS}") from error
    title = given.url or Path(given.replay).name
    shown = _Shown(_printed if given.json else None, Scrape({}), title)
    with shown:
        if given.url is not None:
            watch(given.url, shown.show, refresh=given.refresh, length=given.length)
        else:
            _play(given, shown, Collector)
    if given.svg is not None and shown.view is not None:
        save_picture(given.svg, shown.view, shown.title)
    return 0


def _printed(view: View) -> None:
    sys.stdout.write(json.dumps(dataclasses.asdict(view)) + "\n")
    sys.stdout.flush()


class _Shown:
    """The screen, or the lines printed instead."""

    def __init__(self, put: Callable[[View], None] | None, before: Scrape, title: str) -> None:
        self.view: View | None = None
        self.title = title
        self._put, self._before, self._live = put, before, None

    def __enter__(self) -> None:
        if self._put is None:
            from rich.live import Live

            self._live = Live(auto_refresh=False)
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            if self.view is not None and not self._live.console.is_terminal:
                self._live.console.line()

    def show(self, scrape: Scrape) -> None:
        """Show the events since the last call."""
        from kvtrie.cli.view import View

        self.view = View.between(self._before, scrape)
        self._before = scrape
        if self._put is not None:
            self._put(self.view)
        elif self._live is not None:
            from kvtrie.cli.screen import draw

            width = self._live.console.width
            self._live.update(draw(self.view, self.title, width), refresh=True)


class Pace:
    """Passes requests on at a given speed, with regular calls of `look`.

    Args:
        look: called every `refresh` seconds.
        refresh: seconds between two calls.
        speed: seconds of the trace per second. None never waits.
        length: seconds after which no request is passed on. None passes on all requests.
        clock: seconds.
        sleep: waits a number of seconds.
    """

    def __init__(
        self,
        look: Callable[[], None],
        *,
        refresh: float,
        speed: float | None = None,
        length: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._look, self._refresh, self._speed = look, refresh, speed
        self._length, self._clock, self._sleep = length, clock, sleep

    def hand_on(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Yield the requests, each at its time."""
        begin = self._clock()
        end = float("inf") if self._length is None else begin + self._length
        next_look, origin = begin + self._refresh, None
        for request in requests:
            origin = request.at if origin is None else origin
            next_request = begin
            if self._speed is not None:
                next_request += (request.at - origin) / _NS / self._speed
            while (now := self._clock()) < next_request or now >= next_look:
                if now >= end:
                    return
                if now >= next_look:
                    self._look()
                    next_look = now + self._refresh
                else:
                    self._sleep(min(next_request, next_look, end) - now)
            if now >= end:
                return
            yield request


def _play(given: argparse.Namespace, shown: _Shown, collector: type[Collector]) -> None:
    from kvtrie.cli.scrape import Scrape
    from kvtrie.settings.tier import Tier
    from kvtrie.sim.replay import open_manager, replay
    from kvtrie.sim.trace import read_trace
    from kvtrie.sim.workloads import FAMILIES

    path = Path(given.replay)
    made = FAMILIES.get(given.replay) if not path.exists() else None
    requests = made() if made is not None else read_trace(path, hash_tokens=given.block_tokens)
    tiers = given.tier or [Tier("gpu", blocks=5859)]
    model, resume = model_of(given, tiers, given.block_tokens)
    options = {"structure": given.structure, "block_tokens": given.block_tokens}
    manager = open_manager(tiers, model=model, resume=resume, policy=given.policy, **options)
    exported = collector(manager)

    def look() -> None:
        shown.show(Scrape.of(exported.collect()))

    pace = Pace(look, refresh=given.refresh, speed=given.speed, length=given.length)
    replay(pace.hand_on(requests), manager, load=given.load, block_tokens=given.block_tokens)
    look()


def watch(
    url: str,
    show: Callable[[Scrape], None],
    *,
    refresh: float,
    length: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the metrics of an address repeatedly. The settings are as for `Pace`.

    Raises:
        ConfigError: the address is unreadable, or exports no metrics of kvtrie.
    """
    end = float("inf") if length is None else clock() + length
    while True:
        show(_fetch(url))
        if clock() + refresh > end:
            return
        sleep(refresh)


def _fetch(url: str) -> Scrape:
    from prometheus_client.parser import text_string_to_metric_families

    from kvtrie.cli.scrape import Scrape

    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"}:
        raise ConfigError(f"URL is {url}, one with http or https wanted")
    address = parts._replace(path="/metrics" if parts.path in {"", "/"} else parts.path).geturl()
    try:
        with urlopen(address, timeout=_PATIENCE_S) as answer:  # noqa: S310 - the scheme is checked
            text = answer.read().decode()
        scrape = Scrape.of(text_string_to_metric_families(text))
    except URLError as error:
        raise ConfigError(f"cannot read {address}: {error.reason}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {address}: {error}") from error
    if "kvtrie_up" not in scrape.samples:
        raise ConfigError(f"{address} exports no metrics of kvtrie")
    return scrape


COMMAND = ("show live what managers do: of a replay, or of a running engine", _arguments)
"""Help text of the command, and its function for arguments."""
