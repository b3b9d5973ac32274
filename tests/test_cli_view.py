"""A view: the figures between two scrapes, and how they fit a terminal."""

import sys

import pytest
from serving import serve, tokens, two_tiers

from kvtrie.cli.scrape import Scrape
from kvtrie.cli.screen import draw
from kvtrie.cli.view import MachineView, TierView, View
from kvtrie.metrics import Collector


def text(drawn, width=140):
    from rich.console import Console

    console = Console(width=width, record=True, file=sys.stderr)
    console.print(drawn)
    return console.export_text()


def test_a_view_is_of_the_time_between_two_scrapes():
    manager = two_tiers(gpu=2, host=4)
    collector = Collector(manager)
    for at in range(4):
        serve(manager, tokens(2, start=100 * at), now=10**9 * at)
    before, old = Scrape.of(collector.collect()), manager.stats()
    for at in range(4, 8):
        serve(manager, tokens(2, start=300), now=10**9 * at)
    after, new = Scrape.of(collector.collect()), manager.stats()
    view = View.between(before, after)
    (machine,), (gpu, host) = view.machines, view.tiers
    seconds, step = (new.now - old.now) / 1e9, new.since(old)
    assert (machine.requests, machine.time) == (4 / seconds, new.now / 1e9)
    assert gpu.hits == step.tiers["gpu"].hits / step.blocks_wanted > gpu.hits_ever
    assert gpu.evictions == step.tiers["gpu"].evicted / seconds
    assert (gpu.used, gpu.slots, gpu.policy) == (1 - new.tiers["gpu"].free / 2, 2, "learned")
    assert host.stores is not None
    first = View.between(Scrape({}), after)
    assert first.machines[0].hits == first.machines[0].hits_ever == machine.hits_ever
    shown = text(draw(view, "title", 140))
    assert "title" in shown
    assert all(word in shown for word in ("gpu", "host", "learned", "evict/s", "100%"))
    assert "policy" not in text(draw(view, "title", 80), 80)
    manager.close()
    closed = View.between(after, Scrape.of(collector.collect()))
    assert "closed or broken" in text(draw(closed, "title", 140))


@pytest.mark.parametrize("width", [80, 140])
def test_large_figures_fit_a_terminal(width):
    tier = TierView(
        machine="0",
        tier="remote",
        policy="checkerboard",
        slots=4_000_000,
        used=1.0,
        clean=1.0,
        hits=1.0,
        hits_ever=1.0,
        evictions=99_940.0,
        age=99.9 * 60,
        loads=(0.9994, 59.94 * 60),
        stores=(9.94, 99.94),
        read=999e6,
        written=99.9e9,
    )
    machine = MachineView("0", up=True, time=9e5, requests=9.99e5, hits=1.0, hits_ever=1.0,
                          blocks=4_000_000, leases=1000, moves=1000)  # fmt: skip
    shown = text(draw(View((machine,), (tier,)), "title", width), width)
    assert "…" not in shown
    assert shown.count("\n") == 6
    assert all(figure in shown for figure in ("99.9k", "100%", "999ms 59.9min", "4,000,000 blocks"))
    assert width == 80 or all(figure in shown for figure in ("999MB", "99.9GB", "checkerboard"))
