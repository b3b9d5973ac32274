"""Servers of two protocols of buckets for tests: Google Cloud Storage's and Azure Blob Storage's.

They keep objects in memory and speak the part that obstore uses, with credentials that they check:
put and conditional put, get, range, head, delete (Azure's in batches), and a list. Invariant: a
request without the right credentials reads and changes nothing.
"""

from __future__ import annotations

import base64
import email
import hashlib
import hmac
import socket
import threading
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET = "kvtrie-test"
ACCOUNT = "kvtrieaccount"


class BucketServer:
    """A server with one bucket on a free port of this machine, which ends with the `with` block.

    Attributes:
        buckets: objects by bucket and name: bytes and a tag.
        requests: methods, paths and conditions of the requests that were allowed.
        port: where it listens.
    """

    def __init__(self):
        self.buckets, self.requests = {BUCKET: {}}, []
        self.lock = threading.Lock()
        self.connections = set()
        self.tags = 0

    def __enter__(self):
        self._server = _Server(("127.0.0.1", 0), self.handler)
        self._server.store = self
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """Close the port and every connection, as a killed server would."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def put(self, bucket, name, value, *, only_new):
        """Write an object, and return its tag; None if `only_new` and it is there."""
        with self.lock:
            objects = self.buckets[bucket]
            if only_new and name in objects:
                return None
            self.tags += 1
            objects[name] = value, str(self.tags)
            return objects[name][1]


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection, in which both protocols agree but for names."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    condition, tag, written, exists = "", "", 200, (409, "")
    denied = no_bucket = (403, "")

    def setup(self):
        super().setup()
        self.server.store.connections.add(self.connection)

    def finish(self):
        self.server.store.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *_):
        """Log nothing."""

    def do_GET(self):
        """Answer a request."""
        store = self.server.store
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        bucket, name = self.place(unquote(parts.path))
        if not self.allowed(parts.path, query):
            return self.error(*self.denied)
        store.requests.append((self.command, name, self.headers.get(self.condition)))
        if bucket not in store.buckets:
            return self.error(*self.no_bucket)
        if not name:
            found = [key for key in store.buckets[bucket] if key.startswith(query["prefix"])]
            return self.answer(200, self.listed(found).encode())
        if self.command == "PUT":
            return self.put(bucket, name, body)
        return self.found(bucket, name)

    do_HEAD = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names that the library calls

    def put(self, bucket, name, body):
        """Write an object, if it is absent or may be replaced."""
        only_new = self.headers.get(self.condition) == self.new
        tag = self.server.store.put(bucket, name, body, only_new=only_new)
        if tag is None:
            self.error(*self.exists)
        else:
            self.answer(self.written, b"", tag)

    def found(self, bucket, name):
        """Answer with an object or remove it."""
        objects = self.server.store.buckets[bucket]
        if name not in objects:
            self.error(404, self.missing)
        elif self.command == "DELETE":
            del objects[name]
            self.answer(204, b"")
        else:
            self.value(*objects[name])

    def value(self, value, tag):
        """Answer with an object or a range of it."""
        asked = self.headers.get("Range")
        if asked is None:
            return self.answer(200, value, tag)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(value))
        if start >= len(value):
            return self.error(416, "InvalidRange")
        span = f"bytes {start}-{stop - 1}/{len(value)}"
        return self.answer(206, value[start:stop], tag, ("Content-Range", span))

    def error(self, status, code):
        """Answer with an error."""
        text = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code></Error>'
        self.answer(status, text.encode())

    def answer(self, status, body, tag=None, *more):
        """Answer with a body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if tag is not None:
            more = (("ETag", f'"{tag}"'), (self.tag, tag), *more)
            more += (("Last-Modified", formatdate(usegmt=True)),)
        for name, text in more:
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _GcsHandler(_Handler):
    condition, new, tag = "x-goog-if-generation-match", "0", "x-goog-generation"
    written, exists = 200, (412, "PreconditionFailed")
    denied, no_bucket, missing = (401, "AuthenticationRequired"), (404, "NoSuchBucket"), "NoSuchKey"

    def place(self, path):
        """Bucket and name of a path."""
        bucket, _, name = path[1:].partition("/")
        return bucket, name

    def allowed(self, path, query):  # noqa: ARG002
        """Whether a request has the token."""
        return self.headers.get("Authorization") == f"Bearer {GcsServer.token}"

    def listed(self, names):
        """The answer to a list."""
        rows = "".join(f"<Contents><Key>{name}</Key></Contents>" for name in names)
        return f"<ListBucketResult>{rows}</ListBucketResult>"


class _AzureHandler(_Handler):
    condition, new, tag = "If-None-Match", "*", "x-ms-version-id"
    written, exists = 201, (409, "BlobAlreadyExists")
    denied, no_bucket = (403, "AuthenticationFailed"), (404, "ContainerNotFound")
    missing = "BlobNotFound"

    def place(self, path):
        """Container and name of a path, which begins with the account."""
        _, container, name = (*path[1:].split("/", 2), "", "")[:3]
        return container, name

    def allowed(self, path, query):
        """Whether a request is signed by the account's key."""
        return self.headers.get("Authorization") == _signature(
            self.command, path, query, self.headers
        )

    def do_POST(self):
        """Answer a batch: each of its parts is a request to delete, signed like any other."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = urlsplit(self.path)
        if not self.allowed(parts.path, dict(parse_qsl(parts.query))):
            return self.error(*self.denied)
        kind = self.headers["Content-Type"]
        batch = email.message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + body)
        lines = []
        for part in batch.get_payload():
            request, _, rest = part.get_payload().partition("\r\n")
            method, path, _ = request.split(" ")
            container, name = self.place(unquote(path))
            headers = email.message_from_string(rest)
            status = "403 AuthenticationFailed"
            if headers["Authorization"] == _signature(method, path, {}, headers):
                found = self.server.store.buckets[container].pop(name, None)
                status = "202 Accepted" if found else "404 BlobNotFound"
            lines += [b"--" + _BOUNDARY, b"Content-Type: application/http"]
            lines += [f"Content-ID: {part['Content-ID']}".encode(), b""]
            lines += [f"HTTP/1.1 {status}".encode(), b"Content-Length: 0", b"", b""]
        lines += [b"--" + _BOUNDARY + b"--", b""]
        kind = "multipart/mixed; boundary=" + _BOUNDARY.decode()
        return self.answer(202, b"\r\n".join(lines), None, ("Content-Type", kind))

    def listed(self, names):
        """The answer to a list."""
        rows = "".join(f"<Blob><Name>{name}</Name></Blob>" for name in names)
        return f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"


_BOUNDARY = b"kvtrie_batch"
_SIGNED = (
    "Content-MD5",
    "Content-Type",
    "Date",
    "If-Modified-Since",
    "If-Match",
    "If-None-Match",
    "If-Unmodified-Since",
    "Range",
)


def _signature(method, path, query, headers):
    """The authorization by an account's key, as Azure's documentation describes it."""
    length = headers.get("Content-Length", "")
    kept = sorted(name.lower() for name in headers if name.lower().startswith("x-ms-"))
    lines = [
        method,
        headers.get("Content-Encoding", ""),
        headers.get("Content-Language", ""),
        "" if length == "0" else length,
        *(headers.get(name, "") for name in _SIGNED),
        *(f"{name}:{headers[name]}" for name in kept),
        f"/{ACCOUNT}{path}",
        *(f"{name.lower()}:{query[name]}" for name in sorted(query)),
    ]
    key = base64.b64decode(AzureServer.key)
    digest = hmac.new(key, "\n".join(lines).encode(), hashlib.sha256).digest()
    return f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"


class GcsServer(BucketServer):
    """A server of Google Cloud Storage's XML API."""

    handler = _GcsHandler
    token = "kvtrie-test-token"  # noqa: S105 - of a server that ends with its test
    environment: ClassVar = {"GOOGLE_BEARER_TOKEN": token}

    @staticmethod
    def url(port, bucket=BUCKET):
        """The URL of a bucket."""
        return f"gs://{bucket}/kv?endpoint=http://127.0.0.1:{port}"


class AzureServer(BucketServer):
    """A server of Azure Blob Storage's REST API."""

    handler = _AzureHandler
    key = base64.b64encode(b"kvtrie-test-key").decode()
    environment: ClassVar = {"AZURE_STORAGE_ACCOUNT_KEY": key}

    @staticmethod
    def url(port, bucket=BUCKET):
        """The URL of a container."""
        return f"az://{ACCOUNT}/{bucket}/kv?endpoint=http://127.0.0.1:{port}/{ACCOUNT}"
