"""Answer a prompt of any length through a selective cache and report the cache's size.

Invariant: the answer is the answer of `kvtrie.selective.generate`. Cost: the prompt in steps.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective import SelectiveCache, generate
from kvtrie.settings.argument import word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtrie.demo.model import Speaker
    from kvtrie.selective import CacheSettings

__all__ = ["answer", "as_precise"]

_PRECISIONS = {
    "32-true": torch.float32,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}


def as_precise(model: Any, precision: str) -> Any:  # noqa: ANN401 - a transformers model, both
    """Return a model with weights and KV of "32-true", "16-true" or "bf16-true".

    Raises:
        ConfigError: an unknown precision.
    """
    return model.to(_PRECISIONS[word("precision", precision, _PRECISIONS)])


def answer(
    speaker: Speaker,
    prompt: str,
    settings: CacheSettings,
    *,
    write: Callable[[str], Any],
    precision: str | None = None,
    device: str = "cpu",
    max_new_tokens: int = 50,
    yarn_rope: bool = True,
    temp_size_gb: float = 3.0,
    seed: int | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> None:
    """Answer a prompt, and write the answers and a line with the cache's size.

    Args:
        speaker: the model and its tokenizer.
        prompt: text of any length.
        settings: of the cache.
        write: takes text.
        precision: "32-true", "16-true" or "bf16-true", of weights and KV. None keeps the model's.
        device: the model's device.
        max_new_tokens: most tokens of the answer.
        yarn_rope: see `SelectiveCache`.
        temp_size_gb: bound of attention's temporary arrays.
        seed: seed of drawn tokens. None draws different tokens each time.
        sampling: sampling arguments of `generate`. None takes the likeliest tokens.

    Raises:
        ConfigError: an empty prompt, or invalid settings.
    """
    model: Any = speaker.model
    if precision is not None:
        model = as_precise(model, precision)
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no model on {device!r}: {error}") from error
    tokens = speaker.tokens(prompt)
    if not tokens:
        raise ConfigError("the prompt has no tokens")
    ids = torch.tensor([tokens], device=model.device)
    with SelectiveCache(model, settings, yarn_rope=yarn_rope) as cache:
        steps = cache.steps(len(tokens))
        used = sum(layer.buffers.nbytes for layer in cache.caches)
        rows = cache.caches[0]
        every = 2 * model.dtype.itemsize * rows.kv_heads * rows.head_dim * len(cache.caches)
    if seed is not None:
        torch.manual_seed(seed)
    made = generate(
        model,
        ids,
        settings,
        yarn_rope=yarn_rope,
        attention_forward_temp_size_gb=temp_size_gb,
        max_new_tokens=max_new_tokens,
        **({"do_sample": False} if sampling is None else sampling),
    )
    for answer_tokens in made[:, len(tokens) :].tolist():
        write(speaker.text(cast("list[int]", answer_tokens)) + "\n\n")
    write(
        f"{speaker.name}: a prompt of {len(tokens)} tokens in {len(steps)} steps, "
        f"{settings.name}: {used / 1e6:.2f} MB of KV instead of {every * len(tokens) / 1e6:.2f}\n"
    )
