"""A turn of the demo: only a tie in the logits excuses another token."""

import pytest
import torch

from kvtrie.demo.turn import _compare

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_only_a_tie_excuses_another_token():
    logits = torch.tensor([[0.0, 1.0, 5.0], [3.0, 3.0005, 0.0]])
    assert _compare([2, 1], logits, [2, 1], logits) == ("equal", 0.0)
    assert _compare([2, 1], logits, [2, 0], logits + 1e-5)[0] == "tie"
    assert _compare([2, 1], logits, [2, 0], logits + 1e-3)[0] == "differs"  # logits disagree
    assert _compare([2, 1], logits, [1, 1], logits)[0] == "differs"  # no tie at step 0
    assert _compare([2, 1], logits, [2], logits[:1])[0] == "differs"  # ended too early
    assert _compare([2], logits[:1], [2, 1], logits)[0] == "differs"  # or too late
