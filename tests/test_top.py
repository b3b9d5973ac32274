"""`kvtrie top`: from scrapes to a screen, at a given pace, of a replay and of an engine."""

import io
import json
from itertools import pairwise

import pytest
from commands import refused, run
from prometheus_client import CollectorRegistry, start_http_server
from rich.console import Console
from serving import serve, tokens, two_tiers

from kvtrie.cli.scrape import quantile
from kvtrie.cli.screen import draw
from kvtrie.cli.top import Pace, watch
from kvtrie.cli.view import MachineView, TierView, View
from kvtrie.metrics import Collector
from kvtrie.sim.trace import write_trace
from kvtrie.sim.workloads import conversations

INF = float("inf")
TRACE = conversations(seed=2, chats=60)
SMALL = ("--tier", "gpu=30", "--tier", "host=60")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, TRACE)
    return str(path)


def test_quantiles_lie_between_their_bounds():
    counts = {1.0: 10, 2.0: 30, 5.0: 40, INF: 40}
    assert quantile(0.25, counts, {}) == 1.0
    assert quantile(0.5, counts, {}) == 1.5
    assert quantile(1.0, counts, {}) == 5.0
    assert quantile(0.5, counts, counts) is None
    assert quantile(0.5, {}, {}) is None
    assert quantile(0.5, counts, {1.0: 10, 2.0: 30, 5.0: 30, INF: 30}) == 3.5
    assert quantile(0.9, {1.0: 1, INF: 10}, {}) == 1.0, "what is beyond the last bound is unknown"


class Time:
    """A clock that only sleeping, and each look at it, moves on."""

    def __init__(self, each=0.0):
        self.now, self.each, self.slept = 100.0, each, []

    def clock(self):
        self.now += self.each
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


def paced(requests, time, **settings):
    looks = []
    pace = Pace(lambda: looks.append(time.now), clock=time.clock, sleep=time.sleep, **settings)
    return [(time.now, request) for request in pace.hand_on(requests)], looks


def test_requests_come_at_the_given_speed():
    few = TRACE[:20]
    handed, looks = paced(few, Time(), refresh=0.25, speed=10.0)
    assert [request for _, request in handed] == few
    for now, request in handed:
        assert now - 100 == pytest.approx((request.at - few[0].at) / 1e10)
    gaps = [late - early for early, late in pairwise(looks)]
    assert gaps == [pytest.approx(0.25)] * len(gaps)
    assert len(looks) == int((few[-1].at - few[0].at) / 1e10 / 0.25)


def test_without_a_speed_nobody_waits():
    time = Time(each=0.01)
    handed, looks = paced(TRACE, time, refresh=0.5)
    assert (len(handed), time.slept) == (len(TRACE), [])
    assert len(looks) >= len(TRACE) * 0.01 / 0.6


def test_it_ends_after_its_duration():
    handed, _ = paced(TRACE, Time(each=0.01), refresh=0.5, length=1.0)
    assert 90 <= len(handed) <= 100
    time = Time()
    handed, _ = paced(TRACE, time, refresh=5.0, speed=1e-6, length=2.0)
    assert (len(handed), time.now) == (1, pytest.approx(102))


def test_a_replay_prints_a_line_per_refresh(capsys, trace, tmp_path):
    picture = tmp_path / "top.svg"
    command = ("top", "--replay", trace, *SMALL, "--policy", "lru", "--json", "--svg", picture)
    status, out, err = run(capsys, *map(str, command))
    assert (status, err) == (0, "")
    last = json.loads(out.splitlines()[-1])
    (machine,), (gpu, host) = last["machines"], last["tiers"]
    assert (machine["leases"], machine["up"], gpu["policy"]) == (0, True, "lru")
    assert (gpu["tier"], gpu["slots"], host["slots"]) == ("gpu", 30, 60)
    replayed = json.loads(run(capsys, "replay", trace, *SMALL, "--policy", "lru", "--json")[1])
    assert machine["hits_ever"] == pytest.approx(replayed["hit_rate"])
    assert "learned" not in picture.read_text()
    assert "font-face" not in picture.read_text()


def test_a_replay_is_drawn_on_a_terminal_too(capsys, trace):
    status, out, _ = run(capsys, "top", "--replay", trace, *SMALL)
    assert status == 0
    assert "moves in flight" in " ".join(out.split())


def test_labels_of_a_server_are_drawn_as_they_are_and_not_as_markup():
    tier = TierView(
        "0", "host\x1b[2J", "[red]x[/red]", 3, 0.5, 1, 0, 0, 0, None, None, None, 0, 0, ((1, 2),)
    )
    machine = MachineView("[b]0\n", True, 0, 0, 0, 0, 0, 0, 0)  # noqa: FBT003 - it is up
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(draw(View((machine,), (tier,)), "[i]title\x07", 200))
    text = console.export_text()
    for shown in ("[red]x[/red]", r"host\x1b[2J", r"machine [b]0\n", r"[i]title\x07"):
        assert shown in text
    assert text.replace("\n", "").isprintable()


def test_an_engine_is_scraped_over_http(capsys):
    manager = two_tiers(gpu=2, host=4)
    serve(manager, tokens(2), now=10**9)
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert "no metrics of kvtrie" in refused(capsys, "top", url, "--json")
        registry.register(Collector(manager))
        status, out, _ = run(capsys, "top", url, "--json", "--refresh", "9", "--for", "1")
        (line,) = out.splitlines()
        assert (status, json.loads(line)["machines"][0]["requests"]) == (0, 1)
        time, seen = Time(), []
        settings = {"refresh": 2.0, "length": 7.0, "clock": time.clock, "sleep": time.sleep}
        watch(url + "/metrics", seen.append, **settings)
        assert [len(seen), *time.slept] == [4, 2, 2, 2]
        assert seen[-1].samples == seen[0].samples
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "cannot read" in refused(capsys, "top", url, "--json")


def test_wrong_arguments_are_refused_in_one_line(capsys, trace, tmp_path):
    assert "one of URL and --replay" in refused(capsys, "top")
    assert "one of URL and --replay" in refused(capsys, "top", "http://x", "--replay", trace)
    assert "http or https" in refused(capsys, "top", "file:///etc/passwd")
    assert "No such file" in refused(capsys, "top", "--replay", str(tmp_path / "none"), "--json")
    assert run(capsys, "top", "--replay", trace, "--refresh", "0")[0] == 2
    lost = str(tmp_path / "none" / "top.svg")
    status, _, err = run(capsys, "top", "--replay", trace, *SMALL, "--json", "--svg", lost)
    assert (status, "cannot write" in err) == (2, True)
