"""Work of the connector in single steps with 256 requests: calls of functions, not their time."""

import sys
from dataclasses import replace

from tests.engines.vllm_blocks import SIZE
from tests.engines.vllm_engine import PlayedRequest, planned, served

from kvtrie import Moves
from kvtrie.engines.vllm.messages import Opened, StepNews
from kvtrie.engines.vllm.scheduler import SchedulerConnector
from kvtrie.engines.vllm.settings import Settings
from kvtrie.transfer.report import MoveReport

REQUESTS, EACH = 256, 125  # prompts, and their full blocks
MOST_CALLS = 10_000  # in a step, of functions in Python and compiled ones: 3 to 4 ms


class Server:
    """A scheduler with room for all requests, whose workers finish all moves of a step."""

    def __init__(self):
        blocks = REQUESTS * (EACH + 2)
        settings = Settings.read({"tiers": [{"kind": "host", "blocks": blocks}]})
        model = replace(served("ab", 1, 1, replicated=False), blocks=blocks + 1)
        opened = {0: Opened([blocks], [2], weights=b"weights")}
        self.connector = SchedulerConnector(settings, model, opened, clock=lambda: 1)
        self.calls, self.steps, self.admitted = 0, [], []

    def counted(self, call, *given):
        """Make a call of the connector and count the functions called in it."""

        def count(_frame, event, _what):
            self.calls += event in {"call", "c_call"}

        sys.setprofile(count)
        try:
            return call(*given)
        finally:
            sys.setprofile(None)

    def step(self, waiting, running, slot):
        """Admit all requests with an answer and compute their prompts. Return the next slot."""
        self.calls, counts = 0, {}
        for request in list(waiting):
            found = self.counted(self.connector.match, request, 0)
            if found is None:
                continue
            request.table = list(range(slot, slot + EACH + 1))
            slot += EACH + 1
            self.counted(self.connector.admit, request, [request.table], found)
            waiting.remove(request)
            running.append(request)
            request.computed = request.num_tokens
            counts[request.request_id] = request.num_tokens
        self.admitted.append(len(counts))
        output = planned(counts)
        output.num_scheduled_tokens |= {each.request_id: 1 for each in running}
        orders = self.counted(self.connector.orders, output)
        ids = [Moves.from_bytes(part).id.tolist() for part in (*orders.moves, *orders.ahead)]
        reports = MoveReport.to_bytes([MoveReport(tuple(each)) for each in ids])
        self.counted(self.connector.on_reports, {0: StepNews(orders.step, reports)})
        self.steps.append(self.calls)
        return slot


def prompts():
    """Requests of different prompts."""
    made = []
    for at in range(REQUESTS):
        tokens = [at % 250, at // 250, *range(250)] * (EACH * SIZE // 250 + 1)
        made.append(PlayedRequest(str(at), tokens[: EACH * SIZE + 1], EACH * SIZE + 1, 1))
    return made


def test_a_burst_of_256_requests_is_admitted_over_several_steps():
    server = Server()
    for found in (0, EACH * SIZE):
        waiting, running, slot = prompts(), [], 1
        while waiting:
            before = len(waiting)
            slot = server.step(waiting, running, slot)
            assert len(waiting) < before, "each step admits a request at least"
        assert all(server.connector.sources(each.request_id, found)[0] == found for each in running)
        for _ in range(3):
            slot = server.step(waiting, running, slot)
        for request in running:
            server.counted(server.connector.end, request)
        server.step(waiting, [], slot)
    assert max(server.admitted) == 24
    assert max(server.steps) <= MOST_CALLS, server.steps
    stats = server.connector.manager.stats()
    assert (stats.leases, stats.moves) == (0, 0)
    server.connector.close()
