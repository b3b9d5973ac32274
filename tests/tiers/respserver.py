"""A small RESP server for tests: a dictionary served over sockets, with faults on demand.

`python respserver.py ADDRESS` prints its port, and ends with its standard input.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from contextlib import suppress

OK, NULL = b"+OK\r\n", b"$-1\r\n"


class RespServer:
    """A server on a free port, which ends with the `with` block.

    Args:
        password: the password that clients have to give, if any.
        address: where it listens.

    Attributes:
        values: values by name.
        expiry: milliseconds that the latest command gave a name.
        calls: names of the commands, in order.
        password: the password that clients have to give, if any.
        error: the answer to every GET, GETRANGE and SET, if any.
        cut: bytes of a value after which the connection is closed, if any.
        stalled: while it is set, values stop in their middle.
    """

    def __init__(self, password=None, address="127.0.0.1"):
        self.address = address
        self.values, self.expiry, self.calls = {}, {}, []
        self.password, self.error, self.cut = password, None, None
        self.stalled, self.released = threading.Event(), threading.Event()
        self.connections = set()
        self.served = 0
        self._server = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.stop()

    def start(self, port=0):
        """Listen; on the port of before to come back."""
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                outer.connections.add(self.connection)
                outer.served += 1
                try:
                    outer.serve(self.rfile, self.connection)
                except (OSError, ValueError):
                    pass
                finally:
                    outer.connections.discard(self.connection)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server((self.address, port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        """Close the port and every connection, as a killed server would."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def serve(self, lines, sock):
        known = self.password is None
        while True:
            head = lines.readline()
            if not head:
                return
            count = int(head[1:])
            words = []
            for _ in range(count):
                size = int(lines.readline()[1:])
                word = lines.read(size + 2)
                if len(word) < size + 2:
                    return  # the client has gone
                words.append(word[:-2])
            name = words[0].upper().decode()
            self.calls.append(name)
            if name == "AUTH":
                known = words[-1].decode() == self.password
                sock.sendall(OK if known else b"-WRONGPASS invalid username-password pair\r\n")
            elif not known:
                sock.sendall(b"-NOAUTH Authentication required.\r\n")
            else:
                self._send(sock, self.answer(name, words))

    def answer(self, name, words):
        if self.error is not None and name in {"GET", "GETRANGE", "SET"}:
            return self.error
        answers = {
            "EXISTS": lambda: b":%d\r\n" % (words[1] in self.values),
            "UNLINK": lambda: b":%d\r\n" % (self.values.pop(words[1], None) is not None),
            "PEXPIRE": lambda: self._expire(words[1], words[2]),
            "SET": lambda: self._set(words),
            "GET": lambda: _bulk(self.values.get(words[1])),
            "GETRANGE": lambda: _bulk(
                self.values.get(words[1], b"")[int(words[2]) : int(words[3]) + 1]
            ),
        }
        return answers.get(name, lambda: OK)()

    def _expire(self, name, milliseconds):
        self.expiry[name] = int(milliseconds)
        return b":%d\r\n" % (name in self.values)

    def _set(self, words):
        if words[1] in self.values:
            return NULL
        self.values[words[1]] = words[2]
        self.expiry[words[1]] = int(words[5])
        return OK

    def _send(self, sock, reply):
        if len(reply) > 100 and self.cut is not None:
            sock.sendall(reply[: self.cut])
            sock.shutdown(socket.SHUT_RDWR)
            raise OSError("cut")
        if len(reply) > 100 and self.stalled.is_set():
            sock.sendall(reply[: len(reply) // 2])
            self.released.wait(timeout=60)
            return
        sock.sendall(reply)


def _bulk(value):
    return NULL if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


if __name__ == "__main__":
    with RespServer(address=sys.argv[1]) as served:
        print(served.port, flush=True)  # noqa: T201 - to the process that started it
        sys.stdin.read()
