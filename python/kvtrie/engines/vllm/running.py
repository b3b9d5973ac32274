"""RunningRequest: an admitted request, its lease, and its tokens that are surely written.

Invariant: what is committed was written by a step that has finished, and stands in slots that the
request owned then. Cost: tokens are converted once each.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from kvtrie import Lease
    from kvtrie.engines.vllm.native_first import NativeFirst

__all__ = ["GrowingTokens", "RunningRequest"]


class GrowingTokens:
    """The tokens of a request as an array that grows in place.

    Args:
        request: vLLM's `Request`.
        native: the native blocks at the start of prompts.
    """

    def __init__(self, request: Request, native: NativeFirst) -> None:
        self._request = request
        self.native = native
        self._sequence = np.empty(0, dtype=np.uint32)
        self._sequence_of = -1  # its tokens
        self._array = np.empty(0, dtype=np.uint32)
        self._count = 0
        self._prompt: int = request.num_prompt_tokens

    def read(self) -> NDArray[np.uint32]:
        """Return the manager's sequence of them; a view that later reads leave alone."""
        tokens = self._read()
        if not self.native.tokens:
            return tokens
        if len(tokens) != self._sequence_of:
            self._sequence, self._sequence_of = self.native.sequence(tokens), len(tokens)
        return self._sequence

    def _read(self) -> NDArray[np.uint32]:
        """All that vLLM knows of them by now."""
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

    def count(self) -> int:
        """Number of tokens that vLLM knows; while it is equal, so are the tokens."""
        return self._request.num_tokens

    def surely_written(self) -> int:
        """Return an upper bound of the sequence whose KV finished steps have written.

        The token that was sampled last is the input of a step that is still to come.
        """
        request = self._request
        sampled = request.num_tokens > request.num_prompt_tokens
        return self.native.stretch(request.num_tokens - sampled)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that vLLM has given blocks to.

    Attributes:
        request: vLLM's `Request`.
        tokens: its tokens.
        lease: kvtrie's hold.
        table: its slots of vLLM's memory, in order; those of native blocks name their parts.
        begun: the step that admitted it.
        prompt: tokens of the request's prompt then; a further input of a session adds to them.
        identity: the name of the weights and adapter that it was admitted under.
        full: the length of the manager's sequence with which a further block is full.
        written: the length of that sequence that finished steps have written.
        stopped: a load of it has failed: nothing of it is committed any more.
        drafted: whether its last planned step was to verify drafts.
        loads: the loads into its slots that have not been reported.
    """

    request: Request
    tokens: GrowingTokens
    lease: Lease
    table: list[int]
    begun: int
    prompt: int
    identity: str | None
    full: int
    written: int = 0
    stopped: bool = False
    drafted: bool = False
    loads: set[int] = field(default_factory=set[int])

    def committable(self) -> int:
        """Length of the sequence that finished steps have written, and that the request still has.

        The next input of a session replaces the token that was sampled last, and a step under way
        may have written that one already. vLLM keeps the tokens that it counts as computed.
        """
        sure = min(self.written, self.tokens.surely_written())
        if self.request.num_prompt_tokens != self.prompt:
            computed = self.tokens.native.stretch(self.request.num_computed_tokens)
            sure = min(sure, computed)
        return sure
