"""Predictions of `kvtrie advise`, and what vLLM servers find in eight settings of two workloads.

    make eval-advise
    make eval-advise ARGS="--quick"

The step times of a vLLM server are measured first, and `kvtrie advise` gets them. Per workload it
listens to a server without kvtrie, its events and metrics, and predicts host memory of two sizes
under two policies. Then servers with these settings answer the same workload (`server`). Both count
the same requests: those that advice finds in the last third of its window, which begins with the
request that warms the server. The model is a random one of SmolLM2's shape with six layers,
`--layers` for others. `--quick` takes a small one, and one setting per workload.
Cost: eleven servers of about a minute on two idle cores.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.engines.launch import PYTHON
from benches.evaluation import Cell, Evaluation, evaluate, lines_of, started, table_of
from kvtrie import ModelShape
from kvtrie.cli.profile import profile_text
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from subprocess import Popen

    from rich.console import Console

    from benches.evaluation import Key

WORKLOADS = {"chats": 8, "agents": 14}
POLICIES = ("lru", "learned")
HOSTS = (128, 256)
GPU, BLOCK = 81, 32
POINTS, PERCENT = 2.0, 5.0
WAIT_S = 60


@dataclass(frozen=True, slots=True)
class Record:
    """The last third of a workload on one server.

    Attributes:
        world: the model.
        workload: its name.
        policy: of host memory; "" for the server without kvtrie.
        host: blocks of host memory; 0 for the server without kvtrie.
        requests: counted requests.
        gpu: share of prompt tokens found in vLLM's own cache.
        found: share found on host.
        prefill_s: seconds of prefill.
        predicted: of the server without kvtrie, `[found, saved]` by policy and host.
    """

    world: str
    workload: str
    policy: str
    host: int
    requests: int
    gpu: float
    found: float
    prefill_s: float
    predicted: dict[str, list[float]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Workload, policy and host."""
        return (self.workload, self.policy, self.host)


class AdviseEvaluation(Evaluation[Record]):
    """Per workload the server that advice listens to, then one server per setting."""

    name = "eval-advise"
    record_name = "eval_advise.json"
    record = Record

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.layers = 1 if given.quick else given.layers
        self.world = "quick" if given.quick else f"{given.layers} layers"
        self.settings = [(policy, host) for policy in POLICIES for host in HOSTS]
        if given.quick:
            self.settings = self.settings[1:2]
        self.folder = tempfile.TemporaryDirectory()
        self.model = ""

    @staticmethod
    def options(parser: argparse.ArgumentParser) -> None:
        """Add the size of the model."""
        parser.add_argument("--layers", type=int, default=6, help="default: %(default)s")
        parser.set_defaults(least={"layers": 1})

    def close(self) -> None:
        """Remove the model."""
        self.folder.cleanup()

    def stages(self) -> Iterator[tuple[str, Sequence[Cell]]]:
        """The servers without kvtrie, then all others."""
        yield (
            "Listening",
            [Cell([(name, "", 0)], partial(self.listened, name)) for name in WORKLOADS],
        )
        yield (
            "Serving",
            [
                Cell([(name, *one) for one in self.settings], partial(self.served, name))
                for name in WORKLOADS
            ],
        )

    def folder_of_model(self) -> str:
        """A random model, made once."""
        if not self.model:
            from transformers import LlamaConfig, LlamaForCausalLM

            sizes = {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}
            sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3}
            sizes["num_hidden_layers"] = self.layers
            config = LlamaConfig(
                vocab_size=512, max_position_embeddings=2048, dtype="float32", **sizes
            )
            LlamaForCausalLM(config).save_pretrained(self.folder.name)
            self.model = self.folder.name
        return self.model

    @cached_property
    def profile(self) -> Path:
        """The step times of a server without kvtrie, in a file."""
        path = Path(self.folder.name) / "profile.toml"
        words = ("--model", "none", "--block-tokens", str(BLOCK), "--out", str(path))
        (lanes,) = lines_of(started("kvtrie", "profile", "--json", *words))
        (steps,) = lines_of(self.start(next(iter(WORKLOADS)), "--profile"))
        path.write_text(profile_text(lanes | steps))
        return path

    def start(self, workload: str, *more: str) -> Popen[str]:
        """Start servers of a workload."""
        words = ["--workload", workload, "--model", self.folder_of_model(), "--gpu", str(GPU)]
        words += ["--turns", str(WORKLOADS[workload] // (2 if self.given.quick else 1)), *more]
        return started("benches.eval_advise.server", *words, python=PYTHON)

    def served(self, workload: str, keys: list[Key]) -> Iterator[Record]:
        """Answer a workload with kvtrie, one setting after the other."""
        names = [f"{policy}:{host}" for _, policy, host in keys]
        rows: list[dict[str, Any]] = []
        for row in lines_of(self.start(workload, "--settings", *names)):
            if "done" not in row:
                rows.append(row)
                continue
            policy, _, host = row["setting"].rpartition(":")
            # The last requests, as many as advice counted.
            count = self.by_key[workload, "", 0].requests
            yield self.counted(rows, count, (workload, policy, int(host)))
            rows = []

    def listened(self, workload: str, _: list[Key]) -> Iterator[Record]:
        """Answer a workload without kvtrie, and let `kvtrie advise` listen."""
        profile = self.profile
        ports = free_ports(3)
        server = self.start(workload, "--ports", *map(str, ports))
        printed = lines_of(server)
        next(row for row in printed if "ready" in row)
        config = json.loads((Path(self.folder_of_model()) / "config.json").read_text())
        block = ModelShape(
            layers=config["num_hidden_layers"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            dtype="float32",
        ).block_bytes(BLOCK)
        # A shell's background jobs ignore SIGINT, and so would advice, which it ends.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        advice = started(
            *("kvtrie", "advise", f"tcp://127.0.0.1:{ports[0]}"),
            *("--replay", f"tcp://127.0.0.1:{ports[1]}"),
            *("--metrics", f"http://127.0.0.1:{ports[2]}/metrics", "--for", "24h"),
            *("--bytes-per-token", str(block // BLOCK), "--disk", "0", "--json"),
            *("--host", ",".join(f"{blocks * block}B" for blocks in HOSTS)),
            *("--link", str(profile)),
        )
        go(server)
        rows: list[dict[str, Any]] = []
        for row in printed:
            if "done" in row:
                break
            rows.append(row)
        advice.send_signal(signal.SIGINT)
        said, _ = advice.communicate(timeout=WAIT_S)
        go(server)
        for _ in printed:  # to the end, which raises if the server failed
            pass
        if advice.returncode:
            raise ConfigError(f"kvtrie advise ended with {advice.returncode}: {said[-300:]}")
        answer = json.loads(said)
        predicted = {
            f"{row['policy']} {row['host'] // block}": [row["found"], row["saved"]]
            for row in answer["rows"]
        }
        rebuilt, counted = answer["window"]["requests"], answer["window"]["counted"]
        if rebuilt != len(rows) + 1:  # the one that warmed the server is in the history
            raise ConfigError(
                f"advice rebuilt {rebuilt} requests of {len(rows) + 1}: turns that follow each "
                "other within 2 s count as one; run on a machine with less load"
            )
        yield self.counted(rows, counted, (workload, "", 0), predicted)

    def counted(
        self,
        rows: list[dict[str, Any]],
        count: int,
        key: tuple[str, str, int],
        predicted: dict[str, list[float]] | None = None,
    ) -> Record:
        """The record of the last requests."""
        some, prompt = rows[-count:], sum(row["prompt"] for row in rows[-count:])
        found = rows[-1]["host"] - rows[-count - 1]["host"]
        cached = sum(row["cached"] for row in some) - found
        prefill_s = sum(row["prefill_s"] for row in some)
        shares = cached / prompt, found / prompt
        return Record(self.world, *key, count, *shares, prefill_s, predicted or {})

    def rows(self) -> list[dict[str, Any]]:
        """Each setting's figures, served and predicted."""
        rows: list[dict[str, Any]] = []
        for name in WORKLOADS:
            stock = self.by_key.get((name, "", 0))
            for policy, host in self.settings:
                real = self.by_key.get((name, policy, host))
                if stock is None or real is None:
                    continue
                found, saved = stock.predicted[f"{policy} {host}"]
                spared = 1 - real.prefill_s / stock.prefill_s
                rows.append(
                    {"workload": name, "policy": policy, "host": host, "requests": real.requests}
                    | {"gpu": real.gpu, "found": real.found, "predicted": found}
                    | {"saved": spared, "saved_predicted": saved}
                    | {"points": 100 * (found - real.found), "percent": 100 * (saved - spared)}
                )
        return rows

    def document(self, about: dict[str, Any]) -> dict[str, Any]:
        """All settings, and the goals."""
        return {"about": about, "goals": [POINTS, PERCENT], "rows": self.rows()}

    def show(self, console: Console) -> None:
        """Print the table."""
        columns = {
            "workload": lambda row: row["workload"],
            "policy": lambda row: row["policy"],
            "host, blocks": lambda row: str(row["host"]),
            "requests": lambda row: str(row["requests"]),
            "GPU": lambda row: f"{100 * row['gpu']:.1f} %",
            "host, found": lambda row: f"{100 * row['found']:.1f} %",
            "predicted": lambda row: f"{100 * row['predicted']:.1f} %",
            "points off": lambda row: f"{row['points']:+.2f}{missed(row['points'], POINTS)}",
            "prefill saved": lambda row: f"{100 * row['saved']:.1f} %",
            "predicted ": lambda row: f"{100 * row['saved_predicted']:.1f} %",
            "points off ": lambda row: f"{row['percent']:+.2f}{missed(row['percent'], PERCENT)}",
        }
        console.print(table_of("Advice", columns, self.rows()))


def missed(value: float, most: float) -> str:
    """A mark for a figure that is beyond its goal."""
    return "" if abs(value) <= most else ", missed"


def go(server: Popen[str]) -> None:
    """Let a server go on."""
    if server.stdin is not None:
        server.stdin.write("\n")
        server.stdin.flush()


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    sys.exit(evaluate(AdviseEvaluation))
