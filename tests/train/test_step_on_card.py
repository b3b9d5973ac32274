"""A training step under a cache on a device has the gradients that it has on a CPU."""

import pytest
from masked import drawn, drawn_settings, grads, make, worst

from kvtrie.train import LongContextGradients, make_head

CLOSE = 1e-3  # sums in another order

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_a_cpu(device):
    def step(device):
        model = make().to(device)
        head = make_head("next_token_prediction", model)
        tool = LongContextGradients(model, head, drawn_settings("lastrec-default", 0))
        ids = drawn(3, total=60).to(device)
        loss = tool.gradients(ids, ids[:, -30:], 1.0)
        return float(loss), {name: grad.cpu() for name, grad in grads(model).items()}

    loss, mine = step(device)
    wanted, truth = step("cpu")
    assert loss == pytest.approx(wanted, rel=1e-3)
    assert worst(mine, truth) < CLOSE
