"""Programs in a network namespace that has nothing but a loopback device.

Mooncake's clients and Dynamo's services listen on every address of their machine, so their tests,
faults and benches run there. `python -m tests.namespace MODULE [ARGUMENT …]` is the inside: it
calls the module's `main`. `entered` moves one thread.
Invariant: the inside ends with the status of `main`, also while threads of a library go on.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from tests import store_servers

INSIDE = "KVTRIE_NAMESPACE" in os.environ
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x1 | 0x40
_NEW_NETWORK = 0x40000000


def possible():
    """Whether this user may make a namespace."""
    unshare = shutil.which("unshare")
    return unshare is not None and not subprocess.call([unshare, "-n", "true"])


def run(module, *arguments, **options):
    """Call `main` of a module in a namespace, with Debian's libraries of the servers.

    Args:
        module: the module's name.
        arguments: what its `main` finds in `sys.argv`.
        options: as of `subprocess.run`.
    """
    environment = {
        **os.environ,
        "KVTRIE_NAMESPACE": "1",
        "LD_LIBRARY_PATH": store_servers.LIBRARIES,
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path]),
    }
    command = ["unshare", "-n", sys.executable, "-m", "tests.namespace", module]
    return subprocess.run([*command, *map(str, arguments)], check=False, env=environment, **options)


@contextmanager
def entered():
    """Move this thread, and the threads and processes that it starts, into a new namespace.

    Raises:
        OSError: this user may not make one; see `possible`.
    """
    with Path("/proc/thread-self/ns/net").open() as home:
        _call("unshare", _NEW_NETWORK)
        try:
            _loopback_up()
            yield
        finally:
            _call("setns", home.fileno(), _NEW_NETWORK)


def _call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _loopback_up():
    with socket.socket() as sock:  # `ip link set lo up`, which not every machine has
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))


def _main():
    _loopback_up()
    sys.path.append(str(store_servers.SITE))
    del sys.argv[:1]
    try:
        status = import_module(sys.argv[0]).main()
    except SystemExit as error:
        status = error.code
    if isinstance(status, str):
        sys.stderr.write(status + "\n")
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    _main()
