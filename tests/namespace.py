"""Programs in a network namespace that has nothing but a loopback device.

Mooncake's clients listen on every address of their machine, so its tests, faults and benches run
there. `python -m tests.namespace MODULE [ARGUMENT …]` is the inside: it calls the module's `main`.
Invariant: the inside ends with the status of `main`, also while threads of a library go on.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from tests import store_servers

INSIDE = "KVTRIE_NAMESPACE" in os.environ
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x1 | 0x40


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


def _main():
    with socket.socket() as sock:  # `ip link set lo up`, which not every machine has
        fcntl.ioctl(sock, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
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
