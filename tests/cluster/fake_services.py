"""Services of Dynamo's kind on loopback, which can also answer wrongly, late or not at all.

`python -m dynamo.indexer` and `select_service` answered as these do, version 1.6.1.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, port, service):
        self.service = service
        self.open = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def get_request(self):
        sock, address = super().get_request()
        self.open.add(sock)
        return sock, address

    def handle_error(self, request, client_address):
        pass  # a client that gave up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        service = self.server.service
        service.connections.add(self.client_address)
        call = self.command, unquote(self.path), json.loads(body) if body else None
        service.calls.append(call)
        if service.hostile is not None:
            self.close_connection = service.hostile(self) != "keep"
            return
        status, answer = service.answer(*call)
        sent = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - names of http.server


class FakeService:
    """A service whose answers subclasses give.

    Attributes:
        calls: calls so far, `(method, path, body)`.
        hostile: None, or what is done to a handler in place of an answer.
        hang: set at the end, for handlers that wait.
    """

    def __init__(self):
        self.calls, self.connections = [], set()
        self.hostile = None
        self.hang = threading.Event()
        self.port = 0
        self.start()

    def start(self):
        self._server = _Server(self.port, self)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def kill(self):
        """End the service and what it knows, as `kill -9` does."""
        self.stop()
        self.forget()

    def forget(self):
        pass

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for sock in self._server.open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.hang.set()
        self.stop()

    def paths(self, method="POST"):
        return [path for made, path, _ in self.calls if made == method]

    def answer(self, method, path, body):
        return 200, {"method": method, "path": path, "body": body}


class FakeIndexer(FakeService):
    """The indexer; `held` has (gpu, cpu, disk) in tokens by machine."""

    def __init__(self):
        self.workers, self.held = {}, {}
        super().__init__()

    def forget(self):
        self.workers, self.held = {}, {}

    def answer(self, method, path, body):
        del method
        call = getattr(self, f"_{path[1:]}", None)
        return (404, None) if call is None else call(body)

    def _workers(self, _):
        return 200, [
            {"instance_id": at, "model_name": "default", "endpoints": {"0": one["endpoint"]}}
            for at, one in self.workers.items()
        ]

    def _register(self, body):
        if body["instance_id"] in self.workers:
            return 409, {"error": "already registered"}
        if body["block_size"] != 16:
            return 409, {"error": f"block_size mismatch: {body['block_size']}"}
        self.workers[body["instance_id"]] = body
        return 201, {"status": "ok"}

    def _unregister(self, body):
        gone = self.workers.pop(body["instance_id"], None) is None
        self.held.pop(body["instance_id"], None)
        return (404, {"error": "not found"}) if gone else (200, {"status": "ok"})

    def _query(self, _):
        if not self.workers:
            return 404, {"error": "no indexer for model=default routing_group=default"}
        counts = {
            str(at): {"longest_matched": max(row), "gpu": row[0], "cpu": row[1], "disk": row[2]}
            for at, row in self.held.items()
        }
        return 200, {"scores": {}, "frequencies": [], "instances": counts}


class FakeSelectionService(FakeService):
    """The selection service, which chooses the allowed machine that comes first in `wanted`."""

    def __init__(self, *wanted):
        self.workers, self.reserved, self.held = {}, {}, {}
        self.wanted = list(wanted)
        super().__init__()

    def forget(self):
        self.workers, self.reserved = {}, {}

    def answer(self, method, path, body):
        name = path.split("/")[1]
        call = getattr(self, f"_{method.lower()}_{name}", None)
        return (404, {"error": "route not found"}) if call is None else call(path, body)

    def _get_loads(self, *_):
        rows = [
            {
                "worker_id": at,
                "active_requests": list(self.reserved.values()).count(at),
                "potential_prefill_tokens": 7,
                "potential_decode_blocks": 3,
            }
            for at in self.workers
        ]
        return 200, [
            {"model_name": "default", "routing_group": "default", "loads": rows},
            {"model_name": "other", "routing_group": "default", "loads": [{"worker_id": 1}]},
        ]

    def _post_overlap_scores(self, *_):
        names = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        rows = [
            {"worker_id": at, **dict(zip(names, row, strict=True))} for at, row in self.held.items()
        ]
        return 200, {"block_size": 16, "workers": rows}

    def _get_workers(self, *_):
        return 200, list(self.workers.values())

    def _post_workers(self, _, body):
        if body["block_size"] != 16:
            why = [f"block_size mismatch: {body['block_size']}"]
            return 201, body | self._named("incomplete") | {"not_schedulable_reasons": why}
        self.workers[body["worker_id"]] = body | self._named("schedulable")
        return 201, self.workers[body["worker_id"]]

    def _delete_workers(self, path, _):
        gone = self.workers.pop(int(path.split("/")[2]), None)
        return (200, gone) if gone else (404, {"error": "worker not found"})

    def _post_reservations(self, path, _):
        known = path.split("/")[2] in self.reserved
        return (200, {"status": "ok"}) if known else (404, {"error": "reservation not found"})

    def _delete_reservations(self, path, body):
        found = self._post_reservations(path, body)
        self.reserved.pop(path.split("/")[2], None)
        return found

    @staticmethod
    def _named(state):
        return {"model_name": "default", "routing_group": "default", "lifecycle": state}

    def _post_select_and_reserve(self, _, body):
        allowed = [at for at in self.workers if at in body["allowed_worker_ids"]]
        if not allowed:
            return 503, {"error": "no endpoints available to route work"}
        chosen = next((at for at in self.wanted if at in allowed), min(allowed))
        self.reserved[body["selection_id"]] = chosen
        return 200, {"selection_id": body["selection_id"], "worker_id": chosen, "dp_rank": 0}


def raw(text):
    """A handler that sends bytes as they are and closes."""

    def send(handler):
        handler.wfile.write(text if isinstance(text, bytes) else text.encode())

    return send


def with_body(body, status="200 OK"):
    """An answer with a body."""
    sent = body if isinstance(body, bytes) else body.encode()
    return raw(f"HTTP/1.1 {status}\r\ncontent-length: {len(sent)}\r\n\r\n".encode() + sent)


def silent(handler):
    """Send nothing until the service is closed."""
    handler.server.service.hang.wait(30)


def trickling(handler):
    """Send an answer without end, a byte at a time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while not handler.server.service.hang.wait(0.005):
        handler.wfile.write(b" ")


def trickling_head(handler):
    """Send a header without end, a byte at a time."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
    while not handler.server.service.hang.wait(0.005):
        handler.wfile.write(b"x")


def continuing(handler):
    """Ask the client to continue, for ever."""
    while not handler.server.service.hang.wait(0.001):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


ANSWERS_THAT_ARE_NONE = {
    "no HTTP": raw("hello\r\n\r\n"),
    "no JSON": with_body("<html>"),
    "half a JSON": with_body('{"instances": {'),
    "deep JSON": with_body("[" * 100_000),
    "a long number": with_body("1" * 5000),
    "another form": with_body('{"hello": 1}'),
    "a list": with_body("[1, 2]"),
    "no UTF-8": with_body(b"\xff\xfe{}"),
    "10 MB": with_body(b"[" + b"1," * 5_000_000 + b"1]"),
    "a length of 10 MB": raw(
        "HTTP/1.1 200 OK\r\ncontent-length: 10000000\r\n\r\n" + " " * (5 << 20)
    ),
    "10 MB in chunks": raw(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"100000\r\n%b\r\n" % (b" " * (1 << 20)) * 10
    ),
    "a long line": raw("HTTP/1.1 200 OK\r\nx: " + "y" * 100_000),
    "many headers": raw("HTTP/1.1 200 OK\r\n" + "x: y\r\n" * 1000 + "\r\n"),
}
"""Answers that count as "invalid", by name."""

ANSWERS_THAT_END = {
    "nothing": raw(""),
    "half a head": raw("HTTP/1.1 200 OK\r\ncontent-le"),
    "half a body": raw('HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"a": '),
}
"""Answers that the service does not end."""

ANSWERS_THAT_ARE_LATE = {
    "silent": silent,
    "a trickling body": trickling,
    "a trickling head": trickling_head,
    "continues for ever": continuing,
}
"""Answers that do not come in time."""
