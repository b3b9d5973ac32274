"""Export of a run as a trace for ui.perfetto.dev and chrome://tracing.

A machine is a process. Its engine and each of its lanes are threads. A request is a slice from its
arrival to its last token. Format: JSON of the Trace Event Format, with times in microseconds.
Invariant: a line per event, ordered by machine and track. Cost: a line per step, transmission and
request.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtrie.output import writing_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kvtrie._kvtrie import Simulation

__all__ = ["write_perfetto"]

_NS_PER_US = 1000


def write_perfetto(
    path: Path, simulation: Simulation, requests: Iterable[dict[str, Any]] = ()
) -> None:
    """Write the recorded steps, transmissions and requests of a watched run.

    Args:
        path: output file.
        simulation: simulation run after `watch(spans=True)`.
        requests: request lines of `run_config`.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing_text(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        comma = "\n"
        for event in _events(simulation, requests):
            file.write(comma + json.dumps(event))
            comma = ",\n"
        file.write("\n]}\n")


def _events(simulation: Simulation, requests: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    tracks: dict[tuple[int, str], int] = {}
    for machine, lane, start, end, moved in simulation.spans():
        name = lane or "engine"
        if (track := tracks.get((machine, name))) is None:
            track = tracks[machine, name] = len(tracks)
            yield _name("process_name", machine, track, f"machine {machine}")
            yield _name("thread_name", machine, track, name)
        what = "step" if lane is None else "transmission"
        event = {"name": what, "ph": "X", "pid": machine, "tid": track, "ts": start / _NS_PER_US}
        event["dur"] = (end - start) / _NS_PER_US
        yield event if lane is None else {**event, "args": {"bytes": moved}}
    for line in requests:
        if line["end_ns"] is None:
            continue
        about = {"name": f"request {line['id']}", "cat": "request", "id": line["id"]}
        about["pid"] = line["machine"]
        found = {"hit_tokens": line["hit_tokens"], "computed_tokens": line["computed_tokens"]}
        yield {**about, "ph": "b", "ts": line["arrival_ns"] / _NS_PER_US, "args": found}
        yield {**about, "ph": "n", "ts": line["first_token_ns"] / _NS_PER_US, "args": {}}
        yield {**about, "ph": "e", "ts": line["end_ns"] / _NS_PER_US}


def _name(what: str, machine: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": machine, "tid": track, "args": {"name": name}}
