"""RequestSequence: the manager's sequence of tokens for a request of vLLM.

Positions in it differ from numbers of tokens if the first blocks of prompts are native. The
scheduler converts between them only here. Cost: each token is converted once.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from kvtrie.engines.vllm.native_first import NativeFirst

__all__ = ["RequestSequence"]


class RequestSequence:
    """A sequence growing in place with the tokens of its request.

    Args:
        request: vLLM's `Request`.
        native: the native blocks at the start of prompts.
    """

    def __init__(self, request: Request, native: NativeFirst) -> None:
        self._request, self._native = request, native
        self._sequence = np.empty(0, dtype=np.uint32)
        self._sequence_of = -1  # its tokens
        self._array = np.empty(0, dtype=np.uint32)
        self._count = 0
        self._prompt: int = request.num_prompt_tokens

    def read(self) -> NDArray[np.uint32]:
        """Return the sequence of all known tokens, a view unchanged by later reads."""
        tokens = self._read()
        if not self._native.tokens:
            return tokens
        if len(tokens) != self._sequence_of:
            self._sequence, self._sequence_of = self._native.sequence(tokens), len(tokens)
        return self._sequence

    def _read(self) -> NDArray[np.uint32]:
        """Return all tokens known to vLLM now."""
        count = self._request.num_tokens
        prompt = self._request.num_prompt_tokens
        if count < self._count or prompt != self._prompt:  # vLLM has replaced tokens
            self._array, self._count, self._prompt = np.empty(0, dtype=np.uint32), 0, prompt
            self._sequence_of = -1
        if count > len(self._array):
            grown = np.empty(max(64, count + count // 4), dtype=np.uint32)
            grown[: self._count] = self._array[: self._count]
            self._array = grown
        if count > self._count:
            new = self._request.all_token_ids[self._count : count]
            self._array[self._count : count] = array("I", new)  # thrice as fast as NumPy by itself
            self._count = count
        return self._array[:count]

    @property
    def known(self) -> int:
        """Number of tokens known to vLLM. An equal number means equal tokens."""
        return self._request.num_tokens

    @property
    def request_id(self) -> str:
        """vLLM's name of the request."""
        return self._request.request_id

    def at(self, tokens: int) -> int:
        """Return the position after a number of tokens."""
        return self._native.stretch(tokens)

    def tokens(self, position: int) -> int:
        """Return the number of tokens before a position, without incomplete native blocks."""
        return self._native.shrink(position)

    def tokens_by_source(self, first: int, sources: list[str]) -> Counter[str]:
        """Return the number of tokens by source. A native block counts with its last part.

        Args:
            first: the index of the first block.
            sources: the source of each block from there on.
        """
        counts: Counter[str] = Counter()
        for at, source in enumerate(sources, first):
            begin, end = at * self._native.block_tokens, (at + 1) * self._native.block_tokens
            counts[source] += self.tokens(end) - self.tokens(begin)
        return counts

    def last(self, tokens: int) -> int:
        """Return the length of the last `tokens` tokens in the sequence."""
        return self.at(self.known) - self.at(max(0, self.known - tokens))

    def computed(self) -> int:
        """Return the position after the tokens counted by vLLM as computed or scheduled."""
        return self.at(self._request.num_computed_tokens)

    def surely_written(self) -> int:
        """Return an upper bound of the sequence with KV written by finished steps.

        The last sampled token is the input of a later step.
        """
        request = self._request
        sampled = request.num_tokens > request.num_prompt_tokens
        return self.at(request.num_tokens - sampled)

    def slots(self, slots: list[int], first: int = 0) -> list[int]:
        """Return the manager's slots of blocks in vLLM's slots.

        Args:
            slots: vLLM's slots.
            first: the index of the first of these blocks in the sequence.
        """
        native = self._native
        if not native.tokens:
            return slots
        return native.slots_of(
            slots, self.tokens(first * native.block_tokens) // native.block_tokens
        )
