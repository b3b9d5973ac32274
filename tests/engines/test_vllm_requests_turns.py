"""Sessions with streaming input: a turn's last token is replaced by the next input."""

import pytest
from tests.engines.vllm_engine import SIZE, Engine


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("more", [1, 3, 9])
def test_a_replaced_token_names_no_block(more, written):
    """The last token of the first turn would fill block 1; a step under way may write it."""
    engine = Engine("", 1, 1, 0)
    engine.whole = True
    engine.add("session", [1, 2, 3, 4, 5, 6, 7], 99)
    (request,) = engine.seen
    engine.plan()
    engine.execute()
    assert request.num_tokens == 2 * SIZE
    stale = list(request.all_token_ids)
    engine.scheduler.match(request, 0)  # whatever reads the tokens before they are replaced
    if written:
        engine.plan()
    engine.replace(request, 2 * SIZE - 1, [8] * more)
    while engine.under_way:
        engine.execute()
    request.answer = 2
    engine.drain()
    assert engine.on_host(stale) == [0]
    assert engine.on_host(request.all_token_ids) == list(range((request.num_tokens - 1) // SIZE))
    assert engine.scheduler.manager.stats().leases == 0
    engine.scheduler.manager.audit()
    engine.close()


def test_an_input_that_waits_leaves_only_stored_blocks():
    """The run of the first turn is committed while the next input has not been scheduled."""
    engine = Engine("", 1, 1, 0)
    engine.whole = True
    engine.add("session", [1, 2, 3, 4, 5, 6, 7], 99)
    (request,) = engine.seen
    engine.plan()
    engine.execute()
    engine.plan()
    engine.replace(request, 2 * SIZE - 1, [8] * 5)
    engine.waiting.clear()  # no budget for it
    for _ in range(3):
        engine.step()
    engine.running.append(request)
    stale = [1, 2, 3, 4, 5, 6, 7, *([8] * 5)]
    engine.finish(request)
    engine.drain()
    assert engine.on_host(stale) == [0]
    engine.close()
