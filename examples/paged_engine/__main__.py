"""Serve a few chats with the paged engine, and compare every token with transformers.

    python -m examples.paged_engine

The exit status is the verdict: 0 if every answer is what the unsharded model generates by itself
and all that this example is there to show has happened; 1 if not; 130 after Ctrl-C.
Cost: seconds, nearly all of them for importing torch in three processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.paged_engine.scheduler import StepReport


def main() -> int:
    """Run the example, print its report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.paged_engine")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--audit", action="store_true", help="check kvtrie's books at every step")
    parser.add_argument("--gpu", type=int, default=16, help="slots (default: %(default)s)")
    parser.add_argument("--host", type=int, default=32, help="slots (default: %(default)s)")
    parser.add_argument(
        "--fail-on", type=int, default=1, help="rank whose first load fails (default: %(default)s)"
    )
    parser.add_argument(
        "--events", metavar="ENDPOINT", help="publish KV events, as at tcp://127.0.0.1:5557"
    )
    try:
        return _run(parser.parse_args())
    except KeyboardInterrupt:
        return _end("Stopped.", 130)


def _run(given: argparse.Namespace) -> int:
    from examples.paged_engine import chats
    from examples.paged_engine.ranks import RankLostError
    from examples.paged_engine.scheduler import Scheduler
    from kvtrie.cluster import Publisher

    model = chats.tiny_llama()
    try:
        published = given.events is not None
        manager, ranks = chats.start(model, given.gpu, given.host, given.fail_on, events=published)

        def look(step: int, report: StepReport) -> None:
            if given.audit:
                manager.audit()
            if not given.json:
                _print(_line(step, report))

        with closing(ranks), ExitStack() as stack:
            publisher = stack.enter_context(Publisher(manager, given.events)) if published else None
            scheduler = Scheduler(manager, ranks, time.monotonic_ns, publisher)
            answered, reports = chats.serve(scheduler, look)
    except (RankLostError, ValueError) as error:
        return _end(str(error), 1)
    verdict = chats.judge(model, answered, reports)
    if given.json:
        _print(json.dumps(verdict | {"steps": [asdict(one) for one in reports]}))
    else:
        _print(_sentence(verdict))
    return 0 if verdict["ok"] else 1


def _line(step: int, report: StepReport) -> str:
    batch = ", ".join(f"{name} +{count}" for name, count in report.computed.items())
    events = ", ".join(f"{who} {what} {count}" for who, what, count in report.events)
    return f"{step:3}  {batch:32}  {events}".rstrip()


def _sentence(verdict: dict[str, Any]) -> str:
    seen = ", ".join(f"{what} {count}" for what, count in verdict["seen"].items())
    if verdict["wrong"]:
        return f"Wrong tokens: {', '.join(verdict['wrong'])}. Seen: {seen}."
    if verdict["missing"]:
        return f"All tokens are right. Not seen: {', '.join(verdict['missing'])}. Seen: {seen}."
    return f"All tokens are right, to a margin of {verdict['margin']:.3f}. Seen: {seen}."


def _print(line: str) -> None:
    print(line, flush=True)


def _end(why: str, status: int) -> int:
    print(why, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
