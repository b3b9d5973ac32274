"""Reports of copies on a device wait until the device has made them."""

from kvtrie.engines.vllm.device_reports import DeviceReports
from kvtrie.transfer.report import MoveReport


class Event:
    """A device's event, which completes when the test sets it."""

    passed = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


def test_reports_wait_for_the_device_that_copies():
    reports, events = DeviceReports(), [Event() for _ in range(3)]
    one, two, three = ([MoveReport((at,))] for at in range(3))
    reports.add([], events[0])
    reports.add(one, events[0])
    reports.add(two, events[1])
    assert reports.take() == []
    events[1].passed = True
    assert reports.take() == two  # of another stream
    events[0].passed = True
    assert (reports.take(), reports.take()) == (one, [])
    reports.add(three, events[2])
    assert reports.take(wait=True) == three
    assert events[2].passed
    reports.add(one, None)
    assert (reports.take(), reports.take()) == (one, [])
