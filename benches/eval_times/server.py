"""A vLLM server in a process of its own, and what it counts.

Its engine computes with one thread; server, client and copies have the other cores.
Invariant: it ends with its context. Cost: a start of half a minute.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Self

from prometheus_client.parser import text_string_to_metric_families

from benches.engines.launch import PYTHON, ROOT
from kvtrie.errors import ConfigError
from kvtrie.sim.completions import Server

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["BLOCK", "Served"]

BLOCK = 32
MOST_TOKENS, BUDGET, RUNNING = 2304, 1024, 32
STARTS_S, TICK_S = 560, 0.2


class Served:
    """A running server of a model.

    Args:
        model: its folder.
        pool: blocks of the engine's own cache.
        tiers: of kvtrie; without any the server runs without kvtrie.
        log: where its output goes.
        more: further arguments of `vllm serve`.
    """

    def __init__(
        self, model: str, pool: int, tiers: list[dict[str, Any]], log: Path, *more: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [
            "--port",
            str(port),
            "--block-size",
            str(BLOCK),
            "--dtype",
            "bfloat16",
            "--enforce-eager",
        ]
        words += ["--max-model-len", str(MOST_TOKENS), "--num-gpu-blocks-override", str(pool)]
        words += ["--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", str(RUNNING)]
        words += ["--enable-prompt-tokens-details", "--no-enable-log-requests", *more]
        if tiers:
            extra = {"tiers": tiers}
            transfer = {"kv_connector": "KvtrieConnector", "kv_role": "kv_both"}
            transfer["kv_connector_extra_config"] = extra  # pyright: ignore[reportArgumentType]
            words += ["--kv-transfer-config", json.dumps(transfer)]
        path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        self._log = log.open("w")
        command = [str(PYTHON.parent / "vllm"), "serve", model, *words]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        self.url = f"http://127.0.0.1:{port}"
        self.server = Server(self.url)

    def __enter__(self) -> Self:
        """Wait until it answers."""
        until = monotonic() + STARTS_S
        while monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                self.server.send("/health")
            except Exception:  # noqa: BLE001 - not yet
                sleep(TICK_S)
            else:
                return self
        self.close()
        raise ConfigError(f"vLLM did not start: see {self._log.name}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.close()

    def close(self) -> None:
        """End it and all of its processes."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()

    def warm(self) -> None:
        """Have all sizes of steps computed once, then empty all tiers."""
        for tokens in (8, 64, 512, MOST_TOKENS // 2):
            self.server.answer(range(tokens), 4)
        self.server.send("/reset_prefix_cache?reset_external=true", {})

    def metrics(self) -> dict[str, float]:
        """Return the values of its metrics, by name, or by name and tier."""
        text = self.server.send("/metrics").decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                tier = sample.labels.get("tier") or sample.labels.get("source") or ""
                name = f"{sample.name} {tier}".strip()
                values[name] = values.get(name, 0.0) + sample.value
        return values
