"""Sweep: many concurrent runs, with a result file to resume from.

Runs share nothing, so each is a task of an executor. The default executor has a thread per core,
because a run releases the interpreter between two requests. (Rust threads would not be faster: each
run streams its trace through Python.)
Invariant: a result is keyed by everything it depends on, so a file can be reused by any sweep with
the same config. Cost: the runs, and a line per result.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtrie._kvtrie import __version__
from kvtrie.errors import ConfigError
from kvtrie.input import read_text
from kvtrie.settings.argument import text
from kvtrie.sim.run import run_config

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from kvtrie.sim.config import SimulationConfig
    from kvtrie.sim.readers.rows import AnyRow

__all__ = ["digest_of", "iter_sweep", "sweep"]

_ROW = '{"key": "'  # start of each result line


def sweep(
    configs: Sequence[SimulationConfig],
    *,
    executor: Executor | None = None,
    results: Path | None = None,
) -> list[dict[str, Any]]:
    """Run each config once.

    Args:
        configs: configs to run. Equal configs run once.
        executor: any executor of `concurrent.futures` whose workers can read the traces. None
            creates a thread per core.
        results: file of JSON lines. Each new result is appended, and stored results are not run
            again.

    Returns:
        The figures of `run_config`, in the order of the configs.

    Raises:
        ConfigError: invalid settings, or an invalid result file.
    """
    found = dict(iter_sweep(configs, executor=executor, results=results))
    return [found[at] for at in range(len(configs))]


def iter_sweep(
    configs: Sequence[SimulationConfig],
    *,
    executor: Executor | None = None,
    results: Path | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run each config once, and yield each result as it completes.

    Closing the iterator stops the remaining runs.

    Args:
        configs: as of `sweep`.
        executor: as of `sweep`.
        results: as of `sweep`.

    Yields:
        The index of a config and its figures.

    Raises:
        ConfigError: as of `sweep`.
    """
    places: dict[str, list[int]] = {}
    for at, config in enumerate(configs):
        places.setdefault(digest_of(config), []).append(at)
    if results is not None and results.exists() and not results.is_file():
        raise ConfigError(f"the results {results} are read and added to: a regular file wanted")
    stored = {} if results is None else _stored(results)
    for key in places.keys() & stored.keys():
        yield from ((at, stored[key]) for at in places.pop(key))
    with _pool(executor) as start:
        running = {start(configs[where[0]]): key for key, where in places.items()}
        for ended in as_completed(running):
            key, figures = running[ended], ended.result()
            if results is not None:
                _append(results, key, figures)
            yield from ((at, figures) for at in places[key])


def digest_of(config: SimulationConfig) -> str:
    """Return a digest of a run's inputs: settings, trace bytes and version.

    Raises:
        ConfigError: an unreadable trace.
    """
    named, path = config, config.trace.path
    # A generator's requests follow from the settings, so there is no file to digest.
    if config.trace.generator is None:
        try:
            seen = path.stat()
            trace = _digest(path, seen.st_size, seen.st_mtime_ns)
        except OSError as error:
            raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
        named = replace(config, trace=replace(config.trace, path=Path(trace)))
    return hashlib.sha256(f"{__version__} {named!r}".encode()).hexdigest()


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, changed: int) -> str:
    del size, changed  # a different size or time means different content
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stored(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a file by key. An incomplete last line is removed."""
    if not path.exists():
        return {}
    lines = read_text(path, "the results").splitlines(keepends=True)
    stored: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            if not (line.startswith(_ROW) or _ROW.startswith(line)):
                raise ConfigError(f"{path}, line {number}: no result of a sweep")
            _cut(path, len("".join(lines[:-1]).encode()), len("".join(lines).encode()))
            break
        try:
            row: Any = json.loads(line)
            stored[text("key", row["key"])] = dict(row["figures"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: no result of a sweep") from error
    return stored


def _cut(path: Path, size: int, seen: int) -> None:
    """Remove an incomplete last line, so the next result starts a new line.

    A file extended by a concurrent sweep since `seen` bytes were read stays unchanged.
    """
    with path.open("r+b") as file:
        if os.fstat(file.fileno()).st_size == seen:
            file.truncate(size)


def _append(path: Path, key: str, figures: dict[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "figures": figures}) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the results {path}: {error.strerror}") from error


@contextmanager
def _pool(
    executor: Executor | None,
) -> Generator[Callable[[SimulationConfig], Future[dict[str, Any]]]]:
    """Yield a function to start a run. At the end, cancel waiting runs and stop created threads."""
    started: list[Future[dict[str, Any]]] = []
    stop = threading.Event()

    def until_stopped(requests: Iterable[AnyRow]) -> Iterable[AnyRow]:
        for request in requests:
            if stop.is_set():
                raise KeyboardInterrupt
            yield request

    own = None if executor else ThreadPoolExecutor(os.cpu_count(), "kvtrie-sim")

    def start(config: SimulationConfig) -> Future[dict[str, Any]]:
        if own is not None:
            future = own.submit(run_config, config, watch=until_stopped)
        else:
            future = cast("Executor", executor).submit(run_config, config)
        started.append(future)
        return future

    try:
        yield start
    finally:
        stop.set()
        for future in started:
            future.cancel()
        if own is not None:
            own.shutdown()
