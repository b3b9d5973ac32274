"""Servers of shared stores, and all that fails there: server, memory, network.

Invariant: after `heal` a store answers, and keeps all that it takes. Cost: a server per store.
"""

from __future__ import annotations

from contextlib import suppress

from tests import store_servers

__all__ = ["FarServer", "RedisServer", "S3Server", "ServerStore"]

FULL_BYTES = 1 << 20


class ServerStore:
    """A server that is killed and stopped, and by its proxy, if any, cut off and slowed down."""

    outages = ("pause", "stall", "kill")
    probe_s = 0.0
    may_be_away = True
    lost: type[Exception] = OSError

    def __init__(self, server, proxy):
        self.server, self.proxy = server, proxy
        self._paused = False

    @property
    def _reachable(self):
        return self.server.process is not None and not self._paused

    def fault(self, kind, rng):
        """A fault of the server or of the network."""
        if kind == "kill":
            self.server.kill()
            self._paused = False
        elif kind == "pause" and self.server.process is not None:
            self.server.pause()
            self._paused = True
        elif kind == "cut":
            self.proxy.cut = rng.randrange(100, 9000)
        elif kind == "delay":
            self.proxy.delay = rng.choice([0.01, 0.1, 0.4])
        elif kind == "stall":
            self.proxy.stall()
        elif kind == "drop":
            self.proxy.drop()

    def heal(self):
        if self.proxy is not None:
            self.proxy.release()
        if self._paused:
            self.server.resume()
            self._paused = False
        if self.server.process is None:
            self.server.start()


class RedisServer(ServerStore):
    """A Redis or Valkey server; it loses its values when it is killed."""

    faults = ("kill", "pause", "cut", "delay", "stall", "drop", "full", "evict")

    def __init__(self, server, proxy, host="127.0.0.1"):
        import redis  # an extra

        super().__init__(server, proxy)
        self.url = f"redis://{host}:{(proxy or server).port}/0?connect_s=0.2"
        limits = {"socket_timeout": 0.2, "socket_connect_timeout": 0.2, "retry": None}
        self._client = redis.Redis(host, server.port, **limits)
        self.lost = redis.RedisError

    def names(self):
        return sorted(self._client.keys()) if self._reachable else []

    def get(self, name):
        return self._client.get(name) or b""

    def set(self, name, value):
        self._client.set(name, value)

    def remove(self, name):
        self._client.delete(name)

    def fault(self, kind, rng):
        """A fault of the server, of its memory, or of the network."""
        super().fault(kind, rng)
        if kind in {"full", "evict"} and self._reachable:
            policy = "noeviction" if kind == "full" else "allkeys-random"
            self._client.config_set("maxmemory-policy", policy)
            self._client.config_set("maxmemory", FULL_BYTES)

    def heal(self):
        super().heal()
        for _ in range(10):  # one that was stopped may still have commands to answer
            with suppress(self.lost):
                self._client.config_set("maxmemory", 0)
                return
        raise RuntimeError("the server does not answer after it was healed")


class FarServer(RedisServer):
    """A Valkey server in another network namespace, whose link goes down."""

    faults = ("partition", "kill", "pause", "full", "evict")
    outages = ("partition",)

    def __init__(self, server, link):
        super().__init__(server, None, link.address)
        self._link = link

    def fault(self, kind, rng):
        """A fault of the server or of its memory, or the link goes down."""
        if kind == "partition":
            self._link.cut()
        super().fault(kind, rng)

    def heal(self):
        self._link.join()
        super().heal()


class S3Server(ServerStore):
    """A server of S3's protocol, which keeps its objects when it is killed."""

    faults = ("kill", "pause", "cut", "delay", "stall", "drop", "evict")

    def __init__(self, server, proxy):
        import obstore  # an extra
        from obstore.store import S3Store

        super().__init__(server, proxy)
        bucket, endpoint = store_servers.make_bucket(server), "http://127.0.0.1"
        plain = {"region": "us-east-1", "client_options": {"allow_http": True, "timeout": "2s"}}
        plain["retry_config"] = {"max_retries": 0}
        self._client = S3Store(bucket, endpoint=f"{endpoint}:{server.port}", **plain)
        self._obstore, self.lost = obstore, obstore.exceptions.BaseError
        self.url = (
            f"s3://{bucket}/kv?region=us-east-1&connect_s=0.2&endpoint={endpoint}:{proxy.port}"
        )

    def heal(self):
        """Let it answer; one that was started again is ready when it keeps an object."""
        started = self.server.process is None
        super().heal()
        if started:
            store_servers.until(self._keeps)

    def _keeps(self):
        with suppress(self.lost):
            self.set("kv/ready", b"1")
            return self.get("kv/ready") == b"1"
        return False

    def names(self):
        if not self._reachable:
            return []
        return sorted(row["path"] for part in self._obstore.list(self._client) for row in part)

    def get(self, name):
        return bytes(self._obstore.get(self._client, name).bytes())

    def set(self, name, value):
        self._obstore.put(self._client, name, value)

    def remove(self, name):
        self._obstore.delete(self._client, name)

    def fault(self, kind, rng):
        """A fault of the server or network, or another client removes half of the objects."""
        super().fault(kind, rng)
        for name in self.names() if kind == "evict" else ():
            if rng.random() < 0.5:
                self.remove(name)
