"""The control socket: its answers, its file, and bytes and JSON of any content."""

import json
import socket
import stat
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtrie import BlockManager, ConfigError, Demote, ModelShape, Scope, Tier
from kvtrie.engines.server.why import Admitted, MissCounter

pytest.importorskip("uvicorn", reason="the control socket needs uvicorn and starlette")

from kvtrie.engines.server.commands import CommandQueue, read_command
from kvtrie.engines.server.control import (
    Controlled,
    ControlSocket,
    _alone,
    control_path,
    socket_path,
)


class UnixConnection(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=30)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(self.path)


def make_engine():
    shape = ModelShape(layers=1, kv_heads=1, head_dim=4)
    tiers = [Tier(kind, blocks=64) for kind in ("gpu", "host", "disk")]
    manager = BlockManager(shape, tiers, block_tokens=16, explain=True)
    why = MissCounter(manager, min_tokens=0, per_second=20)
    return Controlled(manager, why, lambda: {"tokens asked": 3}, {"why_per_second": 20})


@pytest.fixture
def served(tmp_path):
    engine = make_engine()
    control = ControlSocket(str(tmp_path / "kv.sock"), engine)
    yield engine, control
    control.close()
    assert not Path(control.path).exists()


def ask(control, method, path, body=None):
    connection = UnixConnection(control.path)
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body))
    reply = connection.getresponse()
    status, content = reply.status, reply.read()
    connection.close()
    return status, json.loads(content) if content.startswith(b"{") else content


def test_counters_limits_and_explanations_are_read(served):
    engine, control = served
    tokens = np.arange(40, dtype=np.uint32)
    engine.why.admitted(Admitted("chatcmpl-1", tokens, Scope()), 0, 10**9)
    engine.why.drain()
    status, stats = ask(control, "GET", "/stats")
    assert (status, stats["counters"]) == (200, {"tokens asked": 3})
    assert stats["manager"]["tiers"]["host"]["slots"] == 64
    assert ask(control, "GET", "/limits")[1]["block_tokens"] == 16
    assert ask(control, "GET", "/why")[1]["missed_tokens"] == {"new": 32, "not cacheable": 8}
    assert ask(control, "GET", "/why/chatcmpl-1")[1]["computed"] == 40
    assert ask(control, "GET", "/why/other%20one")[0] == 404
    assert ask(control, "GET", "/nothing")[0] == 404
    assert ask(control, "GET", "/release")[0] == 405
    engine.why.close()


def test_commands_wait_for_the_next_step(served):
    engine, control = served
    manager, text = engine.manager, list(range(48))
    manager.mark(text, 1, present=True, now=1, scope=Scope(tenant=b"s"))
    body = {"tokens": text, "cache_salt": "s"}
    keep = [{"end": 16, "priority": 90}]
    assert ask(control, "POST", "/retain", {**body, "retain": keep}) == (202, {"waiting": 1})
    assert manager.stats().tiers["host"].retained == 0
    engine.commands.apply(manager, "", 2)
    assert manager.stats().tiers["host"].retained == 1
    assert ask(control, "POST", "/prefetch", body)[0] == 202
    assert ask(control, "POST", "/release", {"session": "chat"})[0] == 202
    assert ask(control, "POST", "/drop", {"tokens": text, "cache_salt": "other"})[0] == 202
    engine.commands.apply(manager, "", 3)
    assert manager.stats().tiers["host"].copies == 3
    assert ask(control, "POST", "/drop", body)[0] == 202
    engine.commands.apply(manager, "", 4)
    assert manager.stats().tiers["host"].copies == 0
    counts = ask(control, "GET", "/stats")[1]["commands"]
    assert (counts["waiting"], counts["applied"], counts["failed"]) == (0, 5, 0)


def test_what_an_owner_retains_leaves_what_the_session_retains():
    engine = make_engine()
    manager, text = engine.manager, list(range(48))
    manager.mark(text, 1, present=True, now=1)

    def keep(now, **more):
        engine.commands.put(read_command("retain", {"tokens": text, **more}))
        engine.commands.apply(manager, "", now)
        [first, *_] = manager.lookup(text, now=now, keep=0).blocks
        return manager.explain(first.block, now=now, tier="host").priority

    assert keep(1, retain=[{"priority": 60}]) == 60
    assert keep(2, retain=[{"priority": 50, "ttl_s": 5}], owner="tools") == 60
    assert keep(3, retain=[{"priority": 40}]) == 50
    with pytest.raises(ConfigError, match="owner has 257 bytes"):
        keep(4, owner="x" * 257)
    with pytest.raises(ConfigError, match="release has no 'owner'"):
        read_command("release", {"session": "a", "owner": "b"})


def test_progress_of_a_tool_brings_its_session_from_disk_in_time(served):
    engine, control = served
    manager, text, scope = engine.manager, np.arange(48), Scope(tenant=b"s")
    with manager.acquire(text, now=1, session="chat", scope=scope, keep=0) as lease:
        lease.commit(text, now=1)
    manager.hint([Demote(session="chat", scope=scope, tier="disk")], now=2)
    for now in range(3, 9):
        manager.complete(manager.moves().id, now=now)
    assert manager.stats().tiers["disk"].copies == 3
    body = {"session": "chat", "cache_salt": "s"}
    for eta_s, loads in ((60, 0), (0, 3)):
        assert ask(control, "POST", "/progress", {**body, "eta_s": eta_s})[0] == 202
        engine.commands.apply(manager, "", 10)
        assert manager.moves().dst.tolist() == [1] * loads
    assert ask(control, "GET", "/stats")[1]["commands"]["failed"] == 0


def test_a_prefetch_with_a_deadline_begins_with_a_later_step(served):
    engine, control = served
    manager, text = engine.manager, list(range(48))
    manager.mark(text, 2, present=True, now=1)
    assert ask(control, "POST", "/prefetch", {"tokens": text, "deadline_s": 60})[0] == 202
    engine.commands.apply(manager, "", 2)
    assert not len(manager.moves())
    while (due := manager.next_due()) is not None:
        assert due > 50 * 10**9
        manager.hint([], now=due - 1)
        assert not len(manager.moves())
        manager.hint([], now=due)
    assert manager.moves().dst.tolist() == [1] * 3


def test_reset_is_left_to_the_engine(served):
    engine, control = served
    assert not engine.commands.apply(engine.manager, "", 1)
    assert ask(control, "POST", "/reset", {}) == (202, {"waiting": 1})
    assert engine.commands.apply(engine.manager, "", 2)
    assert engine.commands.as_dict() == {"waiting": 0, "applied": 1, "failed": 0, "error": ""}


def test_at_most_64_commands_are_applied_per_step_and_1024_wait(served):
    engine, control = served
    for _ in range(1024):
        assert engine.commands.put(release())
    assert ask(control, "POST", "/release", {"session": "a"})[0] == 503
    engine.commands.apply(engine.manager, "", 1)
    assert len(engine.commands) == 1024 - 64


def release():
    return read_command("release", {"session": "a"})


def test_a_command_that_fails_ends_nothing():
    engine = make_engine()
    with engine.manager.acquire(list(range(32)), now=1, keep=0, load="none") as lease:
        lease.commit(np.arange(32, dtype=np.uint32), now=1)
        engine.manager.close()
    commands = CommandQueue()
    commands.put(release())
    commands.apply(engine.manager, "", 2)
    assert (commands.applied, commands.failed) == (0, 1)
    assert commands.as_dict()["error"].startswith("release: ")


def test_the_socket_is_for_its_user_alone(served):
    _, control = served
    assert stat.S_IMODE(Path(control.path).stat().st_mode) == 0o600


def test_a_live_socket_is_refused_and_a_dead_one_is_replaced(served, tmp_path):
    _, control = served
    with pytest.raises(ConfigError, match="another process listens"):
        ControlSocket(control.path, make_engine())
    dead = str(tmp_path / "dead.sock")
    code = f"import socket, os; s = socket.socket(socket.AF_UNIX); s.bind({dead!r}); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Path(dead).exists()
    again = ControlSocket(dead, make_engine())
    assert ask(again, "GET", "/limits")[0] == 200
    again.close()
    again.close()


def test_an_ended_server_leaves_the_socket_of_its_successor(tmp_path):
    first = ControlSocket(str(tmp_path / "kv.sock"), make_engine())
    Path(first.path).unlink()
    second = ControlSocket(first.path, make_engine())
    first.close()
    assert ask(second, "GET", "/limits")[0] == 200
    second.close()
    assert not Path(second.path).exists()


def test_a_socket_that_begins_to_listen_meanwhile_is_not_taken_for_a_dead_one(tmp_path):
    path = str(tmp_path / "kv.sock")
    made = []

    def begin():
        made.append(ControlSocket(path, make_engine()))

    with _alone(path):
        other = threading.Thread(target=begin)
        other.start()
        assert not Path(path).exists()
    other.join()
    with pytest.raises(ConfigError, match="another process listens"):
        begin()
    made[0].close()


def test_a_server_that_cannot_listen_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space")

    monkeypatch.setattr(Path, "chmod", full)
    with pytest.raises(ConfigError, match="no space"):
        ControlSocket(str(tmp_path / "kv.sock"), make_engine())
    assert not [*tmp_path.iterdir()]


def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="a file that is no socket"):
        ControlSocket(str(file), make_engine())
    assert file.read_text() == "x"
    with pytest.raises(ConfigError, match="No such file"):
        ControlSocket(str(tmp_path / "no" / "kv.sock"), make_engine())
    for path, said in (("kv.sock", "an absolute path"), ("/" + "x" * 100, "101 bytes"), (3, "str")):
        with pytest.raises(ConfigError, match=said):
            socket_path("control", path)


def test_each_data_parallel_rank_has_its_own_socket():
    assert control_path("/run/kv.sock", 0, several=False) == "/run/kv.sock"
    assert control_path("/run/kv.sock", 0, several=True) == "/run/kv-0.sock"
    assert control_path("/run/kv.sock", 1, several=True) == "/run/kv-1.sock"
    assert control_path("/run/kv-{rank}.sock", 0, several=False) == "/run/kv-0.sock"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/release", {}, "one of session, tokens"),
        ("/release", {"session": "a", "tokens": [1]}, "one of session, tokens"),
        ("/release", [1], "an object wanted"),
        ("/release", {"session": "a", "retain": []}, "release has no 'retain'"),
        ("/retain", {"session": "a", "retain": [{"priority": 101}]}, "priority is 101"),
        ("/retain", {"session": "a", "retain": [{}] * 65}, "more than 64"),
        ("/prefetch", {"tokens": []}, "at least one integer"),
        ("/prefetch", {"tokens": [1.5]}, "at least one integer"),
        ("/prefetch", {"tokens": [-1]}, "-1 to -1"),
        ("/prefetch", {"tokens": [2**32]}, "4294967296"),
        ("/prefetch", {"tokens": [2**70]}, "at least one integer"),
        ("/prefetch", {"tokens": [[1], [2, 3]]}, "integers wanted"),
        ("/drop", {"session": "a"}, "drop is about tokens"),
        ("/progress", {"session": "a"}, "eta_s is None"),
        ("/progress", {"session": "a", "eta_s": -1}, "eta_s is -1"),
        ("/prefetch", {"session": "a", "deadline_s": -1}, "deadline_s is -1"),
        ("/release", {"session": "a", "deadline_s": 1}, "release has no 'deadline_s'"),
        ("/progress", {"tokens": [1], "eta_s": 1}, "progress is about a session"),
        ("/release", {"session": "a", "eta_s": 1}, "release has no 'eta_s'"),
        ("/reset", {"session": "a"}, "reset has no 'session': {} wanted"),
        ("/release", {"session": "\ud800"}, "surrogates"),
        ("/release", b"{", "Expecting"),
        ("/release", b"[" * 100_000, "recursion"),
        ("/release", b"\x80", "utf-8"),
    ],
)
def test_a_body_that_cannot_be_is_answered_with_its_error(served, path, body, said):
    engine, control = served
    status, answer = ask(control, "POST", path, body)
    assert status == 400
    assert said in answer["error"]
    assert len(engine.commands) == 0


def test_a_long_body_is_refused(served):
    _, control = served
    assert ask(control, "POST", "/release", b" " * (2 << 20))[0] == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(
        ["session", "tokens", "cache_salt", "retain", "start", "end", "priority", "ttl_s"]
    ), inner),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(
        ["/release", "/retain", "/prefetch", "/drop", "/reset", "/why/x", "/", "/stats"]
    ),
    body=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_no_body_ends_the_server(served, path, body):
    engine, control = served
    status, _ = ask(control, "POST", path, body)
    assert status in {202, 400, 404, 405}
    engine.commands.apply(engine.manager, "", 5)
    assert ask(control, "GET", "/limits")[0] == 200


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300))
def test_no_bytes_end_the_server(served, data):
    _, control = served
    for sent in (data, b"POST /retain HTTP/1.1\r\nhost: a\r\ncontent-length: 999\r\n\r\n" + data):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(control.path)
        raw.sendall(sent)
        raw.close()  # the client disconnects, in the middle of a request
    assert ask(control, "GET", "/limits")[0] == 200


def test_clients_that_leave_in_the_middle_of_a_body_are_not_logged(tmp_path, caplog):
    engine = make_engine()
    control = ControlSocket(str(tmp_path / "kv.sock"), engine)
    for _ in range(4):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(control.path)
        raw.sendall(b"POST /retain HTTP/1.1\r\nhost: a\r\ncontent-length: 999\r\n\r\n{")
        assert ask(control, "GET", "/limits")[0] == 200  # the body is being read
        raw.close()
    assert ask(control, "GET", "/limits")[0] == 200
    control.close()
    assert not caplog.records
    assert len(engine.commands) == 0
    engine.why.close()
