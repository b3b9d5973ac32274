"""The tokens of a running vLLM request as an array that grows."""

import numpy as np
import pytest

from kvtrie.engines.vllm.native_first import NativeFirst
from kvtrie.engines.vllm.sequence import RequestSequence


class Growing:
    """A request whose answer grows."""

    def __init__(self):
        self.all_token_ids = [1, 2, 3]
        self.num_prompt_tokens = 3

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


def test_tokens_grow_in_place_and_the_last_one_sampled_is_not_written():
    growing = Growing()
    tokens = RequestSequence(growing, NativeFirst(0, 0, 4, 8))
    assert tokens.read().tolist() == [1, 2, 3]
    assert tokens.surely_written() == 3
    for at in range(200):
        growing.all_token_ids.append(at)
        assert tokens.read().tolist() == growing.all_token_ids
        assert tokens.read().dtype == np.uint32
    assert tokens.surely_written() == 202
    del growing.all_token_ids[5:]
    assert tokens.read().tolist() == growing.all_token_ids


def test_the_sequence_has_native_blocks_once_per_part():
    growing = Growing()
    tokens = RequestSequence(growing, NativeFirst(4, 3, 4, 8))
    assert tokens.read().tolist() == [1, 2, 3]
    growing.all_token_ids += [4, 5]
    read = tokens.read()
    assert read.tolist() == [1, 2, 3, 4] * 3 + [5]
    assert tokens.read() is read
    assert tokens.surely_written() == 12
    growing.all_token_ids.append(6)
    assert tokens.read().tolist() == [1, 2, 3, 4] * 3 + [5, 6]
    assert tokens.known == 6
    growing.all_token_ids[1:] = [7, 8, 9]
    assert tokens.read().tolist() == [1, 7, 8, 9] * 3


@pytest.mark.parametrize("parts", [0, 3])
def test_tokens_of_native_blocks_count_with_the_last_part(parts):
    growing = Growing()
    growing.all_token_ids = list(range(18))
    sequence = RequestSequence(growing, NativeFirst(8 if parts else 0, parts, 4, 8))
    last = sequence.last(5)
    assert sequence.read()[-last:].tolist() == [13, 14, 15, 16, 17]
    sources = ["disk", "disk", "store", "disk", "store", "disk"]
    counts = sequence.tokens_by_source(1, sources)
    wanted = {"disk": 8, "store": 4} if parts else {"disk": 16, "store": 8}
    assert {source: count for source, count in counts.items() if count} == wanted
    assert sequence.last(100) == len(sequence.read())
