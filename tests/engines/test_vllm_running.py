"""The tokens of a running vLLM request as an array that grows."""

import numpy as np

from kvtrie.engines.vllm.running import GrowingTokens


def test_tokens_grow_in_place_and_the_last_one_sampled_is_not_written():
    class Growing:
        def __init__(self):
            self.all_token_ids = [1, 2, 3]
            self.num_prompt_tokens = 3

        @property
        def num_tokens(self):
            return len(self.all_token_ids)

    growing = Growing()
    tokens = GrowingTokens(growing)
    assert tokens.read().tolist() == [1, 2, 3]
    assert tokens.surely_written() == 3
    for at in range(200):
        growing.all_token_ids.append(at)
        assert tokens.read().tolist() == growing.all_token_ids
        assert tokens.read().dtype == np.uint32
    assert tokens.surely_written() == 202
    del growing.all_token_ids[5:]
    assert tokens.read().tolist() == growing.all_token_ids
