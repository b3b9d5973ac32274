"""Shows the two sides of a divergence point as text, with a model's tokenizer on this machine.

Invariant: the marked part begins at the first different character. Cost: a tokenizer loaded once,
and at most 256 tokens decoded per point.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from kvtrie.errors import ConfigError
from kvtrie.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["marked", "tokenizer_of"]

_CONTEXT = 40  # characters before and after the difference
_AGAIN = 8  # equal characters to end a difference


def tokenizer_of(model: str) -> Callable[[Mapping[str, Any]], tuple[str, str]]:
    """Return a function for decoding the cached and the asked side of a divergence point.

    Args:
        model: name or folder, as for `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: transformers is not installed, or the model has no tokenizer here.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("--show-text needs: pip install 'kvtrie[hf]'") from error
    load: Any = AutoTokenizer.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - untyped
    try:
        tokenizer: Any = load(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--show-text is {model}: {str(error).splitlines()[0]}") from error

    def sides(point: Mapping[str, Any]) -> tuple[str, str]:
        cached, asked = (
            str(tokenizer.decode([*point["before"], *point[side]])) for side in ("cached", "asked")
        )
        return marked(cached, asked)

    return sides


def marked(cached: str, asked: str) -> tuple[str, str]:
    """Return 40 characters around the first difference of two texts, and mark the difference.

    Args:
        cached: the cached text.
        asked: the text of the request.
    """
    pairs = zip(cached, asked, strict=False)
    first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None:
        first = min(len(cached), len(asked))
    one, other = cached[first:], asked[first:]
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    again = next((block for block in blocks if block.size >= _AGAIN), blocks[-1])
    before = cached[max(0, first - _CONTEXT) : first]

    def side(text: str, end: int) -> str:
        marked = f"{before}>>>{text[:end]}<<<{text[end : end + _CONTEXT]}"
        return printable(marked, len(marked))

    return side(one, again.a), side(other, again.b)
