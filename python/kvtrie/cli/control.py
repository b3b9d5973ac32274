"""`kvtrie ctl` and `kvtrie why`: the control socket of a running server.

Invariant: a command is sent once. Cost: a request.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvtrie.engines.server.commands import COMMANDS
from kvtrie.engines.server.control_client import ask
from kvtrie.input import json_of
from kvtrie.printable import printable

if TYPE_CHECKING:
    import argparse

__all__ = ["CTL", "WHY", "ask"]

_READ = ("stats", "why", "limits")
_SHOWN_TOKENS = 8


def _ctl_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("socket", metavar="SOCKET", help="the server's setting `control`")
    commands = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    for name in _READ:
        summary = f"print the answer to GET /{name}"
        read = commands.add_parser(name, help=summary, description=summary)
        if name == "why":
            read.add_argument("request", metavar="ID", nargs="?", help="a recent request")
        read.set_defaults(run=_read)
    for name in COMMANDS:
        summary = f"queue {name} for the server's next step"
        send = commands.add_parser(name, help=summary, description=summary)
        send.set_defaults(run=_send, session=None, tokens=None, salt=None)
        if name == "reset":
            continue
        send.add_argument("--session", metavar="NAME", help="the conversation")
        send.add_argument("--tokens", metavar="JSON", help="the token ids, or - for standard input")
        send.add_argument("--salt", metavar="TEXT", help="the cache_salt of its requests")
        if name == "retain":
            send.add_argument("--ranges", metavar="JSON", help='as a request has "retain"')
        if name == "progress":
            send.add_argument("--eta", metavar="S", type=float, help="seconds until it goes on")
        if name == "prefetch":
            send.add_argument(
                "--deadline", metavar="S", type=float, help="seconds until the blocks are wanted"
            )


def _read(given: argparse.Namespace) -> int:
    name = getattr(given, "request", None)
    route = f"/{given.action}" + ("" if name is None else "/" + quote(name, safe=""))
    sys.stdout.write(json.dumps(ask(given.socket, route), indent=1) + "\n")
    return 0


def _send(given: argparse.Namespace) -> int:
    body: dict[str, Any] = {"session": given.session, "cache_salt": given.salt}
    if given.tokens is not None:
        text = sys.stdin.read() if given.tokens == "-" else given.tokens
        body["tokens"] = json_of(text, "--tokens is no JSON")
    if getattr(given, "ranges", None) is not None:
        body["retain"] = json_of(given.ranges, "--ranges is no JSON")
    if getattr(given, "eta", None) is not None:
        body["eta_s"] = given.eta
    if getattr(given, "deadline", None) is not None:
        body["deadline_s"] = given.deadline
    body = {name: value for name, value in body.items() if value is not None}
    sys.stdout.write(json.dumps(ask(given.socket, f"/{given.action}", json.dumps(body))) + "\n")
    return 0


def _why_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("socket", metavar="SOCKET", help="the server's setting `control`")
    add("--show-text", metavar="MODEL", help="decode both sides with this model's tokenizer, here")
    add("--limit", type=int, default=5, help="number of listed divergences (5)")
    add("--json", action="store_true", help="print a JSON document")
    parser.set_defaults(run=_why)


def _why(given: argparse.Namespace) -> int:
    found = ask(given.socket, "/why")
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    total = sum(found["missed_tokens"].values())
    sys.stdout.write(f"{total} computed prompt tokens\n")
    for cause, count in sorted(found["missed_tokens"].items(), key=lambda row: -row[1]):
        sys.stdout.write(f"  {printable(cause):<15}{count:>14}  {count / max(total, 1):6.1%}\n")
    if (kept := found.get("format")) is not None:
        cost = "not measured" if kept["kl_mean"] is None else f"{kept['kl_mean']:.2e} nats"
        cost += f" over {kept['tokens']} tokens" if kept.get("tokens") else ""
        sys.stdout.write(f"found tokens had KV in {printable(kept['name'])}, mean KL {cost}\n")
    if not found["breakers"]:
        sys.stdout.write("no prompt has diverged from a cached one\n")
    decode = None
    if given.show_text is not None:
        from kvtrie.engines.server.show_text import tokenizer_of

        decode = tokenizer_of(given.show_text)
    for rank, one in enumerate(found["breakers"][: given.limit], 1):
        sys.stdout.write(_breaker(rank, one))
        sides = _tokens(one) if decode is None else decode(one)
        for name, side in zip(("cached", "asked"), sides, strict=True):
            sys.stdout.write(f"   {name:<7} {side}\n")
    return 0


def _breaker(rank: int, one: dict[str, Any]) -> str:
    session = "" if one["session"] is None else f", session {printable(one['session'])}"
    return (
        f"{rank}. {one['recurring']} recurring tokens computed by {one['requests']} requests that "
        f"part at token {one['position']} of {one['tokens']}{session}\n"
    )


def _tokens(one: dict[str, Any]) -> list[str]:
    return [" ".join(map(str, one[side][:_SHOWN_TOKENS])) for side in ("cached", "asked")]


CTL = ("read from or command a running server by its control socket", _ctl_arguments)
WHY = ("list the points at which prompts diverge from cached ones", _why_arguments)
