"""ControlSocket: statistics, explanations and commands over HTTP on a unix socket.

Needs `pip install 'kvtrie[control]'`. vLLM and SGLang install both libraries. The server runs in a
thread of the engine's scheduler process. It reads counters and queues commands. Only `/stats` takes
the manager's lock.
Invariant: no request, of any size or content, ends or blocks the engine. The socket has mode 0600.
Its file is removed only by its own server, or by a later server after the first has ended.
Cost: a thread, asleep between requests.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import stat
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtrie.engines.server.commands import COMMANDS, MOST_PER_STEP, CommandQueue, read_command
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.settings.argument import text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from kvtrie import BlockManager
    from kvtrie.engines.server.why import MissCounter

__all__ = ["ControlSocket", "Controlled", "control_path", "socket_path"]

_LONGEST = 100  # bytes of a path: the kernel takes 107
_MOST_BODY = 1 << 20  # parsing holds the interpreter's lock
_CONNECTIONS = 32
_WAIT_S = 5


@dataclass(frozen=True, slots=True)
class Controlled:
    """The parts of an engine read by a control socket, and its queue of commands.

    Attributes:
        manager: the manager.
        why: causes of computed tokens, None if they are not counted.
        counters: returns further counters.
        settings: engine settings reported by `/limits`.
        commands: commands for the engine's next step.
    """

    manager: BlockManager
    why: MissCounter | None
    counters: Callable[[], Mapping[str, Any]]
    settings: Mapping[str, Any]
    commands: CommandQueue = field(default_factory=CommandQueue)


def control_path(path: str, rank: int, *, several: bool) -> str:
    """Return the socket of a data-parallel rank: `NAME-0.sock` for the first of several ranks.

    `{rank}` in a path is replaced.
    """
    if "{rank}" in path:
        return path.replace("{rank}", str(rank))
    if not several:
        return path
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}-{rank}{whole.suffix}"))


def socket_path(name: str, given: object) -> str:
    """Check the path of a unix socket.

    Raises:
        ConfigError: the path is not a text, not absolute, or longer than 100 bytes.
    """
    path = text(name, given)
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{name} is {path!r}, an absolute path wanted")
    if len(path.encode()) > _LONGEST:
        raise ConfigError(f"{name} has {len(path.encode())} bytes, at most {_LONGEST} wanted")
    return path


class ControlSocket:
    """A server on a unix socket, in its own thread.

    Args:
        path: the socket's file.
        engine: the parts of the engine to serve.

    Raises:
        ConfigError: uvicorn or starlette is not installed, a running process listens at the path,
            the path is not a socket, or the socket cannot be created.
    """

    def __init__(self, path: str, engine: Controlled) -> None:
        try:
            import uvicorn

            app = _app(engine)
        except ImportError as error:
            raise ConfigError("control needs: pip install 'kvtrie[control]'") from error
        self.path, self._closed = path, False
        self._socket, self._place = _listening(path)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=_WAIT_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._socket]},
            name="kvtrie control",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server and remove the socket's file. Idempotent.

        A file created there by a different server stays.
        """
        if self._closed:
            return
        self._closed = self._server.should_exit = True
        self._thread.join(_WAIT_S)
        self._socket.close()
        with suppress(OSError), _alone(self.path):
            _remove(self.path, self._place)


def _listening(path: str) -> tuple[socket.socket, os.stat_result]:
    """Listen at a path, replacing a stale socket. Return the socket and its file's status."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _alone(path):
            _clear(path)
            made.bind(path)
            try:
                Path(path).chmod(0o600)  # before anything can connect
                made.listen()
                place = Path(path).lstat()
            except OSError:
                Path(path).unlink()
                raise
    except OSError as error:
        made.close()
        raise ConfigError(f"control is {path}: {error.strerror or error}") from error
    except ConfigError:
        made.close()
        raise
    return made, place


@contextmanager
def _alone(path: str) -> Generator[None]:
    """Lock the folder of a path, so only this server creates or removes sockets there."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _remove(path: str, place: os.stat_result) -> None:
    """Remove a file, unless it has been replaced."""
    with suppress(FileNotFoundError):
        found = Path(path).lstat()
        # A new file may get the inode number of a removed file.
        if os.path.samestat(found, place) and found.st_ctime_ns == place.st_ctime_ns:
            Path(path).unlink()


def _clear(path: str) -> None:
    try:
        place = Path(path).lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(place.st_mode):
        raise ConfigError(f"control is {path}, a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_WAIT_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            _remove(path, place)
            return
    raise ConfigError(f"control is {path}, where another process listens")


def _app(engine: Controlled) -> Starlette:
    from starlette.applications import Starlette
    from starlette.routing import Route

    api = _Api(engine)
    gets = {
        "/stats": api.stats,
        "/why": api.why,
        "/why/{request_id:path}": api.why_of,
        "/limits": api.limits,
    }
    routes = [Route(path, call, methods=["GET"]) for path, call in gets.items()]
    routes += [Route(f"/{name}", api.command, methods=["POST"]) for name in COMMANDS]
    return Starlette(routes=routes)


class _Api:
    """Answers to the routes."""

    def __init__(self, engine: Controlled) -> None:
        self._engine = engine

    async def stats(self, _request: Request) -> Response:
        """Return the counters of the manager, of the engine, and of commands."""
        engine = self._engine
        try:
            manager = engine.manager.stats().as_dict()
        except KvtrieError as error:
            return _answer({"error": str(error)}, 503)
        counters, commands = dict(engine.counters()), engine.commands.as_dict()
        return _answer({"manager": manager, "counters": counters, "commands": commands})

    async def why(self, _request: Request) -> Response:
        """Return tokens by cause, the top divergence points, and the format of lower tiers."""
        if self._engine.why is None:
            return _answer({"error": "why is off"}, 404)
        settings = self._engine.settings
        about = {"format": settings["format"]} if "format" in settings else {}
        return _answer(self._engine.why.summary() | about)

    async def why_of(self, request: Request) -> Response:
        """Return the explanation of a request."""
        name = request.path_params["request_id"]
        found = None if self._engine.why is None else self._engine.why.answer(name)
        if found is None:
            return _answer({"error": f"{name[:99]!a} is none of the last requests"}, 404)
        return _answer(found)

    async def limits(self, _request: Request) -> Response:
        """Return sizes and limits for requests."""
        own = {"commands_per_step": MOST_PER_STEP, "body_bytes": _MOST_BODY}
        tokens = self._engine.manager.block_tokens
        return _answer({"block_tokens": tokens, **self._engine.settings, **own})

    async def command(self, request: Request) -> Response:
        """Queue a command."""
        from starlette.requests import ClientDisconnect

        body, commands = bytearray(), self._engine.commands
        try:
            async with asyncio.timeout(_WAIT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > _MOST_BODY:
                        return _answer({"error": f"a body of more than {_MOST_BODY} bytes"}, 413)
        except TimeoutError:
            return _answer({"error": f"the body did not arrive in {_WAIT_S} s"}, 408)
        except ClientDisconnect:
            return _answer({"error": "the client left before the end of the body"}, 400)
        try:
            checked = read_command(request.url.path[1:], json.loads(bytes(body)))
        except (KvtrieError, ValueError, RecursionError) as error:
            return _answer({"error": str(error)[:300]}, 400)
        waiting = commands.put(checked)
        if waiting is None:
            return _answer({"error": f"{len(commands)} commands wait already"}, 503)
        return _answer({"waiting": waiting}, 202)


def _answer(content: object, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(content), status, media_type="application/json")
