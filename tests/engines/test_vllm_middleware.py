"""The middleware of agents' clients over an application that plays vLLM's server."""

import asyncio
import json
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.any_input import changed

from kvtrie.engines.server.commands import read_command
from kvtrie.engines.server.pauses import Pauses
from kvtrie.engines.server.request_hints import read_hints
from kvtrie.engines.server.tenant import salt_of, signed, tenant_of
from kvtrie.engines.vllm import middleware
from kvtrie.engines.vllm.middleware import AgentHints

RECORDED = json.loads((Path(__file__).parent / "client_requests.json").read_text())
BODIES = [json.loads(one["body"]) for one in RECORDED]
EPHEMERAL = {"type": "ephemeral"}
CHAT = "/v1/chat/completions"


def characters(shown):
    """The length of a rendered prompt: a token per character of text."""
    if isinstance(shown, dict):
        return sum(
            characters(shown.get(name)) for name in ("system", "messages", "content", "text")
        )
    if isinstance(shown, list):
        return sum(map(characters, shown))
    return len(shown) if isinstance(shown, str) else 0


class Application:
    """A server that keeps what it reads; a rendered prompt has a token per character of text."""

    def __init__(self, status=200, said=("data: 1\n", "data: 2\n")):
        self.read, self.rendered, self.status, self.said = [], [], status, said

    async def __call__(self, scope, receive, send):
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        content = b"".join(each.get("body", b"") for each in messages)
        counts = {"/tokenize": "count", "/v1/messages/count_tokens": "input_tokens"}
        counts["/v1/responses/render"] = "token_ids"
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if path in counts and scope["path"] == scope.get("root_path", "") + path:
            self.rendered.append(json.loads(content))
            found = characters(self.rendered[-1])
            tokens = [7] * found if counts[path] == "token_ids" else found
            tokens = json.dumps({counts[path]: tokens})
            parts = [tokens[:9], tokens[9:]]
        else:
            self.read.append((scope, messages, content))
            parts = self.said
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": parts[0].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": parts[1].encode()})


def post(hints, content, path=CHAT, headers=(), parts=1, **more):
    """Send a body in parts; return the messages of the answer."""
    size = len(content) // parts + 1
    cuts = [content[at : at + size] for at in range(0, len(content), size)] or [b""]
    sent = [
        {"type": "http.request", "body": each, "more_body": at < len(cuts)}
        for at, each in enumerate(cuts, 1)
    ]
    sent.append({"type": "http.disconnect"})
    named = [(b"Content-Length", str(len(content)).encode()), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": named, **more}
    answer = []

    async def receive():
        return sent.pop(0)

    async def send(message):
        answer.append(message)

    async def serve():
        await hints(scope, receive, send)
        await asyncio.gather(*getattr(hints, "_tasks", ()))

    asyncio.run(serve())
    return answer


def served(body, **more):
    """The body that a server reads, and the server."""
    app = Application()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = post(AgentHints(app), content, **more)
    assert [each.get("body") for each in answer] == [None, b"data: 1\n", b"data: 2\n"]
    [(scope, _, read)] = app.read
    assert [value for name, value in scope["headers"] if name.lower() == b"content-length"] == [
        str(len(read)).encode()
    ]
    return read, app


def hints_of(body, **more):
    read, app = served(body, **more)
    return json.loads(read).get("kv_transfer_params", {}).get("kvtrie", {}), app


def counted():
    return {
        (each.labels["hint"], each.labels["outcome"]): each.value
        for metric in middleware._counter().collect()
        for each in metric.samples
        if each.name.endswith("_total")
    }


def counts_of(body, **more):
    """What a request adds to the counters."""
    before = counted()
    served(body, **more)
    return {name: n - before.get(name, 0) for name, n in counted().items() if n != before.get(name)}


def test_recorded_requests_get_these_hints():
    found = []
    for one in RECORDED:
        headers = [(name.encode(), value.encode()) for name, value in one["headers"].items()]
        content = one["body"].encode()
        read, _ = served(content, path=one["path"], headers=headers)
        assert read == content or read.startswith(content[:-1] + b", ")
        given = json.loads(read)
        hints = read_hints(given.pop("kv_transfer_params", None))
        assert hints.ignored == ()
        assert given == json.loads(content)
        found.append((hints.session, [(r.start, r.last, r.ttl_ns // 10**9) for r in hints.ranges]))
    far = 2**63 - 1
    assert found == [
        ("57a121ec-f78c-48c3-a745-e3036a3ecc33", [(0, 24, 3600), (24, far, 300)]),
        ("54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe", [(0, 15, 3600), (15, far, 300)]),
        (None, [(0, far, 300)]),
        ("c0ffee", [(0, 5, 300)]),
        ("conv-3", [(0, far, 86_400)]),
        ("ann", [(0, 15, 43_200)]),
        ("conv-4", [(0, far, 1800)]),
        ("s-9", []),
        ("bob", []),
    ]


def test_a_marked_prefix_is_rendered_by_the_server_once():
    marked = {"type": "text", "text": "12345", "cache_control": EPHEMERAL}
    body = {"model": "m", "tools": [], "messages": [{"role": "system", "content": [marked]}, {}]}
    app = Application()
    hints = AgentHints(app)
    auth = [(b"authorization", b"Bearer a")]
    for at in range(3):
        content = json.dumps({**body, "temperature": at}).encode()
        post(hints, content, headers=auth, root_path="/root", path="/root" + CHAT)
        [row] = json.loads(app.read[-1][2])["kv_transfer_params"]["kvtrie"]["retain"]
        assert row == {"start": 0, "end": 5, "priority": 60, "ttl_s": 300}
    wanted = {"model": "m", "tools": [], "messages": body["messages"][:1]}
    assert app.rendered == [{**wanted, "add_generation_prompt": False}]
    # Another client's prompt is rendered, however long it takes.
    for more in ({"cache_salt": "b"}, {"model": "n"}):
        post(hints, json.dumps({**body, **more}).encode(), headers=auth)
    post(hints, json.dumps(body).encode())
    assert len(app.rendered) == 4


def test_a_prefix_that_the_server_refuses_is_ignored_and_counted():
    marked = {"type": "text", "text": "12345", "cache_control": EPHEMERAL}
    body = {"user": "u", "messages": [{"role": "system", "content": [marked]}, {}]}
    before = counted()
    app = Application(status=400)
    post(AgentHints(app), json.dumps(body).encode())
    kvtrie = json.loads(app.read[0][2])["kv_transfer_params"]["kvtrie"]
    assert kvtrie == {"session": "u"}
    why = ("retain", "a marked prefix that cannot be rendered")
    assert counted()[why] == before.get(why, 0) + 1


def test_unknown_markers_are_counted_and_change_nothing():
    body = {"messages": [{"role": "user", "content": "a", "cache_control": {"type": "magic"}}]}
    content = json.dumps(body).encode()
    assert counts_of(content) == {("retain", "an unknown marker"): 1}
    assert served(content)[0] == content
    body["user"] = "u" * 257
    assert counts_of(body) == {("retain", "an unknown marker"): 1, ("session", "not a name"): 1}
    body["user"] = "u"
    assert counts_of(body) == {("retain", "an unknown marker"): 1, ("session", "mapped"): 1}


def test_hints_of_the_client_come_before_its_conventions():
    own = {"session": "mine", "retain": [{"end": 3}], "why": True}
    body = {"user": "u", "cache_control": EPHEMERAL, "kv_transfer_params": {"kvtrie": own}}
    content = json.dumps(body).encode()
    assert served(content)[0] == content
    del own["retain"]
    body["kv_transfer_params"]["other"] = 3
    read = json.loads(served(body)[0])["kv_transfer_params"]
    rows = [{"start": 0, "priority": 60, "ttl_s": 300}]
    assert read == {"other": 3, "kvtrie": {**own, "retain": rows}}


@pytest.mark.parametrize(
    ("content", "more"),
    [
        (b"", {}),
        (b"{", {}),
        (b"[" * 10**5, {}),
        (b"[1]", {}),
        (b"\xff\xfe\x00", {}),
        (b'{"user": "u", "kv_transfer_params": 3}', {}),
        (b'{"user": "u", "kv_transfer_params": {"kvtrie": []}}', {}),
        (b'{"kv_transfer_params": {"kvtrie": null}}', {}),
        (b"null", {}),
        (b'{"user": "u"}', {"path": "/v1/embeddings"}),
        (b'{"user": "u"}', {"path": CHAT, "root_path": "/v1"}),
        (b'{"user": "u"}', {"method": "PUT"}),
        (b'{"user": "u"}', {"type": "websocket"}),
    ],
)
def test_all_else_passes_byte_for_byte(content, more):
    assert served(content, **more)[0] == content


def test_a_body_above_the_bound_passes_in_its_parts(monkeypatch):
    monkeypatch.setattr(middleware, "_MOST_BODY", 20)
    content = json.dumps({"user": "u", "prompt": "x" * 90}).encode()
    read, app = served(content, parts=10)
    assert read == content
    assert len(app.read[0][1]) == 10
    left = []

    async def seen(_scope, receive, _send):
        left.append(receive.__self__._messages[:])

    post(AgentHints(seen), content, parts=10)
    assert [len(each) for each in left] == [2]  # no more is read ahead than the bound asks for
    assert counts_of(content) == {("request", "too long"): 1}


def test_a_client_that_leaves_before_the_end_is_seen_by_the_server():
    app, sent = Application(), [{"type": "http.disconnect"}]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}

    async def receive():
        return sent.pop()

    async def send(message):
        pass

    asyncio.run(AgentHints(app)(scope, receive, send))
    assert app.read[0][1] == [{"type": "http.disconnect"}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_bodies_of_all_encodings_of_json_get_hints(encoding):
    content = '{"user": "\u00fc", "prompt": "\\ud800 1e400", "n": 1E400}  \n'.encode(encoding)
    hints, _ = hints_of(content, path="/v1/completions")
    assert hints == {"session": "\u00fc"}
    assert hints_of(b" { } ", headers=[(b"X-Session-ID", b"s")])[0] == {"session": "s"}
    raw = '{"user": "u", "prompt": "\ud800"}'.encode("utf-8", "surrogatepass")
    assert hints_of(raw)[0] == {"session": "u"}


def test_an_unexpected_error_passes_the_request(monkeypatch):
    def broken(*_):
        raise RuntimeError("\n\x1b[31m")

    monkeypatch.setattr(middleware, "read_markers", broken)
    content = b'{"user": "u"}'
    assert served(content)[0] == content
    assert counts_of(content) == {("request", "an unexpected error"): 1}


def test_a_body_that_cannot_be_written_again_passes(monkeypatch):
    def too_deep(*_):
        raise RecursionError

    monkeypatch.setattr(middleware, "_appended", too_deep)
    content = b'{"user": "u"}'
    assert served(content)[0] == content
    assert counts_of(content)["request", "too deep"] == 1


@given(changed(*BODIES), st.sampled_from([one["path"] for one in RECORDED]))
def test_any_body_is_served_with_its_fields_as_they_were(body, path):
    before = counted().get(("request", "an unexpected error"), 0)
    read, _ = served(body, path=path)
    sent = json.loads(json.dumps(body))
    got = json.loads(read)
    if isinstance(sent, dict) and got != sent:
        hints = read_hints(got.pop("kv_transfer_params"), None)
        assert hints.ignored == ()
        sent.pop("kv_transfer_params", None)
    assert json.dumps(got) == json.dumps(sent)
    assert counted().get(("request", "an unexpected error"), 0) == before


def vllm(ranks=1, **extra):
    """What a request has of vLLM's application."""
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    parallel = SimpleNamespace(data_parallel_size=ranks)
    config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    return SimpleNamespace(state=SimpleNamespace(vllm_config=config))


CALLS = [
    (CHAT, '{"delta":{"tool_calls":[{"index":0', ',"x":[]}]'),
    (CHAT, '{"message":{"role":"assistant","tool_c', 'alls":[{"id":"c"}]}}'),
    ("/v1/messages", '{"delta":{"stop_reason":"tool', '_use","stop_sequence":null}}'),
    ("/v1/responses", '{"output":[{"type":"function_call"', ',"name":"read"}]}'),
]


@pytest.mark.parametrize(("path", "first", "second"), CALLS)
def test_an_answer_with_tool_calls_keeps_its_session(path, first, second, monkeypatch):
    asked, before = [], counted()
    monkeypatch.setattr(middleware, "ask", lambda *arguments: asked.append(arguments))
    hints = AgentHints(Application(said=(first, second)))
    content = json.dumps({"user": "u", "cache_salt": "salt"}).encode()
    answer = post(hints, content, path, app=vllm(ranks=2, control="/run/s.sock"))
    assert [each.get("body") for each in answer[1:]] == [first.encode(), second.encode()]
    about = {"session": "u", "cache_salt": "salt"}
    retain = {**about, "owner": "tools that run", "retain": [{"priority": 50, "ttl_s": 60}]}
    progress = {**about, "eta_s": 10}
    assert [(socket, route, json.loads(command)) for socket, route, command in asked] == [
        ("/run/s-0.sock", "/retain", retain),
        ("/run/s-0.sock", "/progress", progress),
        ("/run/s-1.sock", "/retain", retain),
        ("/run/s-1.sock", "/progress", progress),
    ]
    read_command("retain", retain)
    read_command("progress", progress)
    assert counted()["pause", "mapped"] == before.get(("pause", "mapped"), 0) + 1


@pytest.mark.parametrize(
    "said",
    [
        ('{"content":"\\"tool_calls\\":[{",', '"tool_calls":[]}'),
        ('{"type":"function_call_output"', "}"),
        ('{"tools":[{"type":"function"}]', "}"),
    ],
)
def test_an_answer_without_tool_calls_is_no_pause(said, monkeypatch):
    monkeypatch.setattr(middleware, "ask", lambda *_: pytest.fail("a command"))
    for path in (CHAT, "/v1/messages", "/v1/responses", "/v1/completions"):
        hints = AgentHints(Application(said=said))
        post(hints, b'{"user": "u"}', path, app=vllm(control="/run/s.sock"))
    hints = AgentHints(Application(said=('"tool_calls":[{', "}")))
    post(hints, b"{}", app=vllm(control="/run/s.sock"))  # of no session


def test_a_pause_without_a_control_socket_is_counted(tmp_path):
    calls, before = Application(said=('"tool_calls":[{', "}")), counted()
    for app in (vllm(), SimpleNamespace(), vllm(control=3)):
        post(AgentHints(calls), b'{"user": "u"}', app=app)
    post(AgentHints(calls), b'{"user": "u"}', app=vllm(control=str(tmp_path / "none")))
    new = {name: count - before.get(name, 0) for name, count in counted().items()}
    assert new["pause", "no control socket"] == 3
    assert new["pause", "refused by the control socket"] == 1


SECRET = b"of the operator"


@pytest.fixture
def operator(tmp_path):
    """What vLLM's application says of a server with tenants."""
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    return vllm(tenant_header="X-Tenant", secret_file=str(tmp_path / "secret"))


def test_a_tenant_of_the_front_end_is_signed_and_has_its_salt(operator):
    head = [(b"x-tenant", b"ann")]
    read, _ = served({"user": "u"}, app=operator, headers=head)
    fields = json.loads(read)
    assert fields["cache_salt"] == salt_of("ann", SECRET)
    assert tenant_of(fields["kv_transfer_params"], SECRET) == b"ann"
    assert fields["kv_transfer_params"]["kvtrie"]["session"] == "u"
    for own in ("a", "b", "\ud800"):
        salted = json.loads(served({"cache_salt": own}, app=operator, headers=head)[0])
        digest = blake2b(own.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        assert salted["cache_salt"] == f"{salt_of('ann', SECRET)}-{digest}"


@pytest.mark.parametrize(
    "head", [[], [(b"X-Tenant", b"a")] * 2, [(b"x-tenant", b"")], [(b"x-tenant", b"\xff")]]
)
def test_a_client_names_no_tenant_itself(head, operator):
    own = {"why": True, **signed("mallory", SECRET)}
    body = {"cache_salt": "mine", "kv_transfer_params": {"kvtrie": own}}
    counts = counts_of(body, app=operator, headers=head)
    assert counts == {("tenant", "not named"): 1}
    fields = json.loads(served(body, app=operator, headers=head)[0])
    assert fields == {"cache_salt": "mine", "kv_transfer_params": {"kvtrie": {"why": True}}}
    body["kv_transfer_params"]["kvtrie"] = ["no object"]
    fields = json.loads(served(body, app=operator, headers=[(b"x-tenant", b"ann")])[0])
    assert fields["kv_transfer_params"] == {"kvtrie": signed("ann", SECRET)}


def test_no_command_names_a_session_of_a_tenant(operator, monkeypatch):
    monkeypatch.setattr(middleware, "ask", lambda *_: pytest.fail("a command"))
    calls, before = Application(said=('"tool_calls":[{', "}")), counted()
    operator.state.vllm_config.kv_transfer_config.kv_connector_extra_config["control"] = "/s"
    post(AgentHints(calls), b'{"user": "u"}', app=operator, headers=[(b"x-tenant", b"ann")])
    assert counted()["pause", "a tenant"] == before.get(("pause", "a tenant"), 0) + 1


def test_a_body_that_is_too_long_to_get_a_tenant_is_refused(operator, monkeypatch):
    monkeypatch.setattr(middleware, "_MOST_BODY", 20)
    app = Application()
    [head, body] = post(AgentHints(app), b'{"prompt": "%s"}' % (b"x" * 90), app=operator)
    assert (head["status"], app.read) == (413, [])
    assert "more than 20 bytes" in json.loads(body["body"])["error"]["message"]


def test_a_secret_that_cannot_be_read_names_no_tenant(operator, tmp_path, caplog):
    (tmp_path / "secret").unlink()
    content = json.dumps({"prompt": "x"}).encode()
    assert served(content, app=operator, headers=[(b"x-tenant", b"ann")])[0] == content
    assert "secret_file" in caplog.text


def test_the_length_of_a_tenants_prompt_is_not_known_to_another(operator):
    marked = {"type": "text", "text": "12345", "cache_control": EPHEMERAL}
    body = {"messages": [{"role": "system", "content": [marked]}, {}]}
    app = Application()
    hints = AgentHints(app)
    for name in (b"ann", b"bob", b"ann"):
        post(hints, json.dumps(body).encode(), app=operator, headers=[(b"x-tenant", name)])
    assert len(app.rendered) == 2


def test_a_pause_is_expected_to_last_as_those_before():
    pauses, mine, other = Pauses(), ("a", ""), ("b", "")
    assert pauses.begin(mine, 0) == 10
    pauses.end(mine, 2)
    pauses.end(mine, 9)  # a further request, of no pause
    assert pauses.begin(mine, 10) == 2
    assert pauses.begin(other, 10) == 2
    pauses.end(other, 20)
    assert pauses.begin(other, 20) == 10
    assert pauses.begin(("c", ""), 20) == 3
    pauses.end(mine, 5)  # a clock that went back
    assert pauses.begin(mine, 20) == 1.75
    for at in range(5000):
        pauses.begin((str(at), ""), 20)
    assert len(pauses._sessions) == 4096


def test_a_request_with_results_ends_the_pause_of_its_session(monkeypatch):
    times, asked = iter([100.0, 130.0, 131.0]), []
    monkeypatch.setattr(middleware, "ask", lambda *said: asked.append(json.loads(said[2])))
    hints = AgentHints(Application(said=('"tool_calls":[{', "}")))
    hints._clock = lambda: next(times)
    for messages in ([{"role": "user"}], [{"role": "user"}, {"role": "tool"}]):
        content = json.dumps({"user": "u", "messages": messages}).encode()
        post(hints, content, app=vllm(control="/run/s.sock"))
    assert [each["retain"][0]["ttl_s"] for each in asked[::2]] == [60, 90]
    assert [each["eta_s"] for each in asked[1::2]] == [10, 30]
