"""Ranks: the two worker processes, as the scheduler sees them.

Invariant: a step is answered by both ranks, or both are gone and `RankLostError` names the one
that ended.
No process waits for a dead one: its end of a pipe is the only one, and closes with it.
Cost: one message to and one from each rank per step.
"""

from __future__ import annotations

import multiprocessing
import signal

from examples.paged_engine.worker import Reply, Setup, StepInput, serve


class RankLostError(RuntimeError):
    """A worker process has ended."""


class Ranks:
    """Starts a process for each of two setups; the processes are joined by a pipe.

    Attributes:
        processes: one for each rank.
    """

    def __init__(self, setups: list[Setup]) -> None:
        spawn = multiprocessing.get_context("spawn")
        between = spawn.Pipe()
        ours, theirs = zip(spawn.Pipe(), spawn.Pipe(), strict=True)
        self._pipes = ours
        self.processes = [
            spawn.Process(target=serve, args=args, name=f"rank {args[0]}", daemon=True)
            for args in zip((0, 1), setups, theirs, between, strict=True)
        ]
        # Workers inherit that Ctrl-C is not for them: they end when the scheduler hangs up.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in self.processes:
            process.start()
        signal.signal(signal.SIGINT, before)
        for pipe in (*theirs, *between):
            pipe.close()

    def step(self, step: StepInput) -> list[Reply]:
        """Have both ranks do the same.

        Raises:
            RankLostError: a process has ended; the other one has been ended.
        """
        try:
            for pipe in self._pipes:
                pipe.send(step)
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, ConnectionError):
            self.close()
        # A rank that only lost its neighbour exits with status 0.
        ends = [(one.name, one.pid, one.exitcode) for one in self.processes if one.exitcode]
        ended = [f"{name} (process {pid}) ended with status {status}" for name, pid, status in ends]
        raise RankLostError(", ".join(ended) or "the workers hung up")

    def close(self) -> None:
        """Hang up, and wait for the processes to end. Closing twice does nothing."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.kill()  # nothing, if it has ended
            process.join()
