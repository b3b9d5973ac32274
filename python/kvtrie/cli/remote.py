"""`kvtrie remote gc`: the arguments, and what is found as text or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "remove expired blocks and stale staging files of a folder:"
    gc = actions.add_parser("gc", help=summary, description=summary)
    gc.add_argument("url", metavar="URL", help="folder:/path?ttl=SECONDS, as the tier has it")
    gc.add_argument("--json", action="store_true", help="print one JSON document")
    gc.set_defaults(run=_gc)


def _gc(given: argparse.Namespace) -> int:
    from kvtrie.tiers.remote.folder import collect
    from kvtrie.tiers.remote.url import RemoteUrl

    url = RemoteUrl.parse("URL", given.url)
    if url.scheme != "folder":
        raise ConfigError(f"{url}: only folder: has files to remove; other stores expire values")
    removed = collect(url)
    if given.json:
        sys.stdout.write(json.dumps({"url": str(url), **asdict(removed)}) + "\n")
    else:
        sys.stdout.write(
            f"{removed.expired} expired blocks and {removed.staged} staging files removed, "
            f"{removed.bytes} bytes; {removed.kept} blocks kept\n"
        )
    return 0


COMMAND = ("look after a shared store", _arguments)
"""The help text of the command, and the function that adds its arguments."""
