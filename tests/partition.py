"""A second network namespace, and the link to it that goes down and up again.

Its tests run in a separate namespace too (`tests.namespace`), so the machine's network does not
change. The far end goes down: packets are lost without an error. Invariant: the link and the
namespace end with the `with` block.
"""

from __future__ import annotations

import shutil
import subprocess

from tests import namespace

NEAR, FAR = "10.77.0.1", "10.77.0.2"


def possible():
    """Whether this user may make two namespaces with a link."""
    tools = all(map(shutil.which, ("ip", "nsenter")))
    link = ["unshare", "-n", "ip", "link", "add", "kv0", "type", "veth", "peer", "name", "kv1"]
    return tools and namespace.possible() and not subprocess.call(link, stderr=subprocess.DEVNULL)


class Partition:
    """A namespace at the far end of a link.

    Attributes:
        address: the address of its servers.
        inside: the beginning of a command that runs there.
    """

    address = FAR

    def __enter__(self):
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=pipe, stdout=pipe)  # noqa: S607 - as everywhere
        self._holder.stdin.write(b"\n")
        self._holder.stdin.flush()
        self._holder.stdout.readline()  # it is there once it answers
        pid = str(self._holder.pid)
        self.inside = ["nsenter", "-t", pid, "-n"]
        _run(["ip", "link", "add", "kv0", "type", "veth", "peer", "name", "kv1", "netns", pid])
        for prefix, device, address in (([], "kv0", NEAR), (self.inside, "kv1", FAR)):
            _run([*prefix, "ip", "address", "add", f"{address}/30", "dev", device])
            _run([*prefix, "ip", "link", "set", device, "up"])
        return self

    def __exit__(self, *_):
        self._holder.communicate()
        subprocess.run(["ip", "link", "delete", "kv0"], check=False, capture_output=True)  # noqa: S607 - as above

    def cut(self):
        """Take the link down."""
        _run([*self.inside, "ip", "link", "set", "kv1", "down"])

    def join(self):
        """Bring the link up."""
        _run([*self.inside, "ip", "link", "set", "kv1", "up"])


def _run(command):
    subprocess.run(command, check=True)
