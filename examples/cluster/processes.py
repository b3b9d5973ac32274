"""Processes of the cluster: engines and Dynamo's services, each of which can be killed or paused.

Invariant: all processes end with the `with` block of a cluster, and engines also with this process.
Dynamo's services listen on every address without authentication, so that a cluster starts only in
a network namespace: `in_namespace` starts the program again in one. Cost: an engine imports torch,
two seconds each.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from examples.cluster.engine_settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

DYNAMO = Path(__file__).parents[2] / "benches" / "peers" / "envs" / "dynamo" / "bin" / "python"
"""Python with Dynamo, as `make peers ARGS=dynamo` installs it."""

MACHINES = 3
_MARK = "KVTRIE_NAMESPACE"
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x1 | 0x40
_READY_S = 60.0
_PORTS = itertools.count(10_000)


class StartError(RuntimeError):
    """A process did not start."""


def in_namespace(module: str, arguments: Sequence[str]) -> int | None:
    """Run a module in a network namespace with nothing but loopback.

    Returns:
        The exit status of that run; None if this process is in such a namespace already.

    Raises:
        StartError: this user may make none.
    """
    if _MARK in os.environ:
        with socket.socket() as sock:  # `ip link set lo up`, which not every machine has
            request = struct.pack("16sh14x", b"lo", _UP_AND_RUNNING)
            fcntl.ioctl(sock, _SET_FLAGS, request)
        return None
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.call([unshare, "-rn", "true"]):  # noqa: S603 - a fixed command
        raise StartError("this user may make no network namespace: unshare -rn true")
    environment = {**os.environ, _MARK: "1"}
    command = [unshare, "-rn", sys.executable, "-m", module, *arguments]
    return subprocess.run(command, check=False, env=environment).returncode  # noqa: S603 - as above


def next_port() -> int:
    """Return a port that nothing uses.

    In a separate namespace that is any port, below those that the system gives to connections: a
    process that starts again needs its own.
    """
    return next(_PORTS)


class Process:
    """A process that can be killed, paused and started again with the same arguments.

    Args:
        command: the program and its arguments.
        log: the file of its output.

    Attributes:
        paused: whether it was paused and not resumed.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command, self._log = list(command), log
        self._process: subprocess.Popen[bytes] | None = None
        self.paused = False

    @property
    def running(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None

    def start(self) -> None:
        """Start it, and return when it answers.

        Raises:
            StartError: it ended, or does not answer.
        """
        self.begin()
        self.await_start()

    def begin(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a command of this example
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def await_start(self) -> None:
        """Return when it answers.

        Raises:
            StartError: it ended, or does not answer.
        """
        until = time.monotonic() + _READY_S
        while not self._answers():
            process = self._process
            if process is None or process.poll() is not None or time.monotonic() > until:
                self.kill()
                text = self._log.read_text(errors="replace")[-2000:]
                raise StartError(f"{' '.join(self._command[:4])} did not start: {text}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self.paused = False

    def pause(self) -> None:
        """Let it keep its connections and answer nothing, as SIGSTOP does."""
        self._signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)
        self.paused = False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        raise NotImplementedError


class DynamoService(Process):
    """Dynamo's `indexer` or `select_service`.

    Attributes:
        url: where it answers.
    """

    def __init__(self, module: str, folder: Path, python: Path = DYNAMO) -> None:
        port = next_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(python), "-m", f"dynamo.{module}", "--port", str(port)]
        super().__init__(command, folder / f"{module}.log")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1):  # noqa: S310 - loopback
                return True
        except OSError:
            return False


class EngineProcess(Process):
    """An engine.

    Args:
        settings: its settings.
        folder: folder of its log.
        inside: the beginning of the command, where it runs in another namespace.

    Attributes:
        settings: its settings.
    """

    def __init__(self, settings: EngineSettings, folder: Path, inside: Sequence[str] = ()) -> None:
        self.settings = settings
        command = [*inside, sys.executable, "-m", "examples.cluster.engine", settings.to_json()]
        super().__init__(command, folder / f"engine{settings.machine}.log")

    def _answers(self) -> bool:
        place = (self.settings.address, self.settings.port)
        try:
            with socket.create_connection(place, timeout=1):
                return True
        except OSError:
            return False


class Cluster:
    """Engines, an indexer and a selection service.

    Args:
        folder: a folder for disks and logs.
        blocks: blocks of each engine on gpu, host and disk.
        store: URL of a store that all engines share; empty without one.
        python: Python with Dynamo.

    Attributes:
        engines: the engines, by machine.
        indexer: the indexer.
        selector: the selection service.
    """

    def __init__(
        self,
        folder: Path,
        blocks: tuple[int, int, int],
        *,
        store: str = "",
        python: Path = DYNAMO,
        far: tuple[int, str, Sequence[str]] | None = None,
    ) -> None:
        self.engines = [_engine(machine, folder, blocks, store, far) for machine in range(MACHINES)]
        self.indexer = DynamoService("indexer", folder, python)
        self.selector = DynamoService("select_service", folder, python)

    @property
    def processes(self) -> list[Process]:
        """All processes."""
        return [*self.engines, self.indexer, self.selector]

    def __enter__(self) -> Self:
        """Start everything.

        Raises:
            StartError: a process does not start.
        """
        try:
            for process in self.processes:
                process.begin()
            for process in self.processes:
                process.await_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill everything."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _engine(
    machine: int,
    folder: Path,
    blocks: tuple[int, int, int],
    store: str,
    far: tuple[int, str, Sequence[str]] | None,
) -> EngineProcess:
    """An engine; the one that `far` names is at an address of another namespace."""
    address, inside = "127.0.0.1", list[str]()
    if far is not None and far[0] == machine:
        address, inside = far[1], list(far[2])
    gpu, host, disk = blocks
    settings = EngineSettings(
        machine=machine,
        port=next_port(),
        events=f"tcp://{address}:{next_port()}",
        replay=f"tcp://{address}:{next_port()}",
        gpu=gpu,
        host=host,
        disk=disk,
        folder=str(folder / f"disk{machine}"),
        store=store,
        address=address,
    )
    return EngineProcess(settings, folder, inside)
