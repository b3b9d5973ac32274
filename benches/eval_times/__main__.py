"""First-token times of vLLM servers, and what the simulator predicts of them.

    make eval-times ARGS="--trace FILE --sessions FILE"
    make eval-times ARGS="--trace FILE --sessions FILE --quick"

First an idle server is profiled. Then servers with SmolLM2 answer chats, documents and agents
without kvtrie, with host memory, and with a small one above a disk, each at several loads. The
simulator plays the same requests with the profile; nothing is fitted to a run that it predicts.
A load is a share of the requests per second that the simulated server sustains. The two files are
recordings that are not part of the project.
Cost: two minutes per run on two idle cores, and a start per server; the same command resumes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benches import tables
from benches.core.place import place
from benches.engines.__main__ import smollm_folder
from benches.eval_times.compare import GOALS, TERMS, errors, summary
from benches.eval_times.page import page
from benches.eval_times.play import play
from benches.eval_times.predict import Predicted, figures_of, predicted, rate
from benches.eval_times.server import BLOCK, Served
from benches.eval_times.workloads import WORKLOADS, write_trace
from benches.evaluation import Cell, Evaluation, evaluate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from benches.evaluation import Key
    from kvtrie.sim.config import SimulationConfig

LOADS = (0.25, 0.55, 0.85)
TIERS = ("none", "host", "host, disk")
SPAN_S, DISK, FLOOD = 120.0, 4000, 120
LONGEST, PROFILED = 2048, 1000  # tokens, and blocks of the engine's cache


@dataclass(frozen=True, slots=True)
class Record:
    """A profile, or one run.

    Attributes:
        world: of all records of one machine.
        workload: its name; "" for the profile.
        tiers: those below the engine's own cache.
        load: share of what the server sustains.
        profile: the profile, as its file has it.
        requests: as of `Played`.
        found: tokens found by tier.
        queue: mean number of requests that waited.
    """

    world: str
    workload: str
    tiers: str
    load: float
    profile: str = ""
    requests: list[tuple[float, float, float, int]] | None = None
    found: dict[str, int] | None = None
    queue: float = 0.0

    @property
    def key(self) -> tuple[str, str, float]:
        """Workload, tiers and load."""
        return (self.workload, self.tiers, self.load)


class TimesEvaluation(Evaluation[Record]):
    """The profile, then one server per workload and tiers, which answers it at each load."""

    name = "eval-times"
    record_name = "eval_times.json"
    record = Record

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.world = "quick" if given.quick else "SmolLM2"
        self.folder = tempfile.TemporaryDirectory()
        self.span = 10.0 if given.quick else SPAN_S
        self.loads = LOADS[1:2] if given.quick else LOADS
        self.names = [name for name in WORKLOADS if self.recording(name)]
        if given.quick:
            self.names = self.names[:1]
        self.model = smollm_folder(Console(stderr=True))

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        """Add the recordings."""
        parser.add_argument("--trace", type=Path, help="the conversation trace")
        parser.add_argument("--sessions", type=Path, help="the recorded agents")
        parser.set_defaults(least={})

    def recording(self, workload: str) -> Path | None:
        """The file of a workload."""
        return self.given.sessions if workload == "agents" else self.given.trace

    def close(self) -> None:
        """Remove the traces."""
        self.folder.cleanup()

    def stages(self) -> Iterator[tuple[str, Sequence[Cell]]]:
        """The profile, then the servers."""
        yield "Profiling", [Cell([("", "", 0.0)], self.profiled)]
        yield (
            "Serving",
            [
                Cell(
                    [(name, tiers, load) for load in self.loads], partial(self.served, name, tiers)
                )
                for name, tiers in product(self.names, TIERS)
            ],
        )

    def profiled(self, _: list[Key]) -> Iterator[Record]:
        """Profile an idle server with kvtrie, whose cache holds all that the profile asks."""
        out, disk = Path(self.folder.name) / "profile.toml", Path(self.folder.name) / "lanes"
        with self.server(PROFILED, [{"kind": "host", "blocks": 64}]) as served:
            words = ["--server", served.url, "--model", "none", "--longest", str(LONGEST)]
            words += ["--block-tokens", str(BLOCK), "--disk", str(disk), "--out", str(out)]
            words += ["--repeats", "2" if self.given.quick else "7"]
            command = (sys.executable, "-m", "kvtrie", "profile", *words)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield Record(self.world, "", "", 0.0, profile=out.read_text())

    def server(self, pool: int, tiers: list[dict[str, Any]]) -> Served:
        """A server with tiers below its own cache."""
        return Served(self.model, pool, tiers, self.given.results.with_suffix(".log"))

    def tiers(self, workload: str, tiers: str) -> list[dict[str, Any]]:
        """The tiers below the engine's own cache."""
        host = WORKLOADS[workload].host
        match tiers:
            case "none":
                return []
            case "host":
                return [{"kind": "host", "blocks": host}]
            case _:
                folder = Path(self.folder.name) / "disk"
                return [
                    {"kind": "host", "blocks": host // 3, "write": "through"},
                    {"kind": "disk", "blocks": DISK, "path": str(folder)},
                ]

    def profile(self) -> Path:
        """The measured profile, in a file."""
        path = Path(self.folder.name) / "measured.toml"
        path.write_text(self.by_key["", "", 0.0].profile)
        return path

    def trace(self, workload: str, count: int, span: float) -> Path:
        """Write a number of requests that come in within some seconds."""
        path = Path(self.folder.name) / "trace.jsonl"
        source = self.recording(workload)
        assert source is not None
        made = WORKLOADS[workload]
        write_trace(path, made, made.asks(source, count, span))
        return path

    def count(self, workload: str, tiers: str, load: float) -> int:
        """The number of requests that makes a load of what the simulated server sustains."""
        flood = self.trace(workload, FLOOD, 1e-3)  # all at once
        sustained = rate(self.simulated(flood, workload, tiers))
        return max(8, round(load * self.span * sustained))

    def simulated(
        self,
        trace: Path,
        workload: str,
        tiers: str,
        change: Callable[[SimulationConfig], SimulationConfig] = TERMS["all"],
    ) -> Predicted:
        """What the simulator says of a trace; the engine's own cache evicts by lru."""
        below = [
            {name: value for name, value in tier.items() if name != "path"}
            for tier in self.tiers(workload, tiers)
        ]
        own = {"kind": "gpu", "blocks": WORKLOADS[workload].pool - 1, "policy": "lru"}
        own |= {"write": "through"} if below else {}
        return predicted(trace, Path(self.model), [own, *below], self.profile(), change)

    def served(self, workload: str, tiers: str, keys: list[Key]) -> Iterator[Record]:
        """Answer a workload at each load."""
        with self.server(WORKLOADS[workload].pool, self.tiers(workload, tiers)) as served:
            for _, _, load in keys:
                trace = self.trace(workload, self.count(workload, tiers, load), self.span)
                served.warm()
                played = play(served, trace)
                yield Record(self.world, workload, tiers, load, **asdict(played))

    def rows(self) -> list[dict[str, Any]]:
        """Compare each run with its prediction, also without each term of the model."""
        rows: list[dict[str, Any]] = []
        for name, tiers, load in product(self.names, TIERS, self.loads):
            run = self.by_key.get((name, tiers, load))
            if run is None or run.requests is None or run.found is None:
                continue
            trace = self.trace(name, len(run.requests), self.span)
            lines = trace.read_text().splitlines()
            prompts = sum(len(json.loads(line)["tokens"]) for line in lines)
            seen = figures_of(run.requests)
            guesses = {
                term: self.simulated(trace, name, tiers, change) for term, change in TERMS.items()
            }
            figures = {term: figures_of(guess.requests) for term, guess in guesses.items()}
            found = guesses["all"].found
            off = {tier: 100 * (found[tier] - run.found[tier]) / prompts for tier in found}
            rows.append(
                {"workload": name, "tiers": tiers, "load": load, "requests": len(run.requests)}
                | {"seen": asdict(seen), "predicted": asdict(figures["all"])}
                | {"errors": errors(seen, figures["all"])}
                | {"queue": [run.queue, guesses["all"].queue]}
                | {"found": {tier: 100 * run.found[tier] / prompts for tier in found}}
                | {"off": off, "points": max(map(abs, off.values()))}
                | {
                    "without": {
                        term: each.median / seen.median - 1 for term, each in figures.items()
                    }
                }
            )
        return rows

    def document(self, about: dict[str, Any]) -> dict[str, Any]:
        """All runs, the goals, and what each term is worth."""
        rows = self.rows()
        terms = {term: median(abs(row["without"][term]) for row in rows) for term in TERMS}
        return {"about": about, "goals": GOALS, "rows": rows} | {
            "summary": summary(rows),
            "terms": terms,
        }

    def show(self, console: Console) -> None:
        """Print the tables as the page has them."""
        about = place()
        console.print(page(self.document(about), tables.grid, tables.when(about)))


if __name__ == "__main__":
    sys.exit(evaluate(TimesEvaluation))
