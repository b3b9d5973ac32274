"""Reports of copies on a device wait until the device has made them."""

import torch

from kvtrie.engines.vllm.device_reports import DeviceReports
from kvtrie.transfer.report import MoveReport


class Event:
    """A device's event, which completes when the test sets it."""

    def __init__(self):
        self.passed = False

    def record(self, stream):
        assert stream == "the stream"

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


def test_reports_wait_for_the_device_that_copies(monkeypatch):
    events = []

    def made():
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(torch.cuda, "Event", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the stream")
    reports = DeviceReports(torch.device("cuda", 0))
    one, two, three = ([MoveReport((at,))] for at in range(3))
    reports.add([])
    reports.add(one)
    reports.add(two)
    assert (len(events), reports.take()) == (2, [])
    events[1].passed = True
    assert reports.take() == []  # in order
    events[0].passed = True
    assert reports.take() == one + two
    reports.add(three)
    assert reports.take(wait=True) == three
    assert events[2].passed
    near = DeviceReports(torch.device("cpu"))
    near.add(one)
    assert (near.take(), near.take(), len(events)) == (one, [], 3)
