"""`Context`: text is cut into chunks of tokens, and every other argument is refused."""

import pytest
import torch
from world import SIZE

from kvtrie.errors import ConfigError
from kvtrie.fuse import Chunk, Context, Monitor


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Context([[1]], [[2, 3]]),
        lambda: Context([[1]], [1.0]),
        lambda: Context([[1]], torch.tensor([1.0], requires_grad=True)),
        lambda: Context([[1]], "text"),
        lambda: Context([[True]], [1]),
        lambda: Context([[2**70]], [1]),
        lambda: Context(7, [1]),
        lambda: Context(None, [1]),
        lambda: Chunk([1], at=0.5),
        lambda: Chunk([1], [(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))], at=2**40),
        lambda: Chunk([1], [(torch.zeros(1, 1, 1),)]),
        lambda: Chunk([1], [(None, None)]),
        lambda: Chunk([1], 7),
        lambda: Context.of(Bytes(), "a \ud800", "b"),
        lambda: Context.of(Bytes(), "a", "\ud800"),
        lambda: Context.of(Bytes(), ["a", b"b"], "c"),
        lambda: Context.of(Bytes(), None, "c"),
        lambda: Context.of(Bytes(), "a", None),
        lambda: Context.of(Bytes(), "a", "b", size=1.5),
        lambda: Context.of(Bytes(), "a", "b", size="1"),
        lambda: Context.of(Bytes(), "a", "b", separator=1),
        lambda: Monitor(rate="0.1"),
        lambda: Monitor(step=float("nan")),
        lambda: Monitor(step=0),
        lambda: Monitor(good=1.5),
        lambda: Monitor(probe=True),
        lambda: Monitor(extra=-1),
    ],
)
def test_hostile_arguments_of_fusion_are_config_errors(make):
    with pytest.raises(ConfigError):
        make()


def test_a_context_cuts_text_and_tokenizes_each_piece():
    class Words:
        def encode(self, text, *, add_special_tokens):
            assert not add_special_tokens
            return [sum(map(ord, word)) for word in text.split()]

    text = "a b\n\nc d\n\n"
    context = Context.of(Words(), ["x" + text, text], "why", separator="\n\n")
    assert [len(chunk.tokens) for chunk in context.chunks] == [2, 2, 2, 2]
    assert context.chunks[1].tokens.tolist() == context.chunks[3].tokens.tolist()
    sized = Context.of(Words(), "One. Two three four. Fi ve", "why", size=12)
    assert [len(chunk.tokens) for chunk in sized.chunks] == [1, 2, 3]
    assert len(Context.of(Words(), "one two", "why").chunks) == 1
    with pytest.raises(ConfigError, match="query of 0"):
        Context.of(Words(), "a", "")
    for wrong in ({"size": 0}, {"separator": ""}, {"size": 3, "separator": "x"}):
        with pytest.raises(ConfigError):
            Context.of(Words(), "a", "why", **wrong)
    assert SIZE == 4
