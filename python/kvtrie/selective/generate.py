"""Generate: a prompt of any length and an answer, in a single call.

Invariant: after the prompt, transformers' `generate` runs unchanged.
Cost: the prompt in steps, then one pass per token.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (transformers leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective.model import SelectiveCache
from kvtrie.settings.argument import instance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtrie.selective.settings import CacheSettings

__all__ = ["generate"]

_DEFAULT_NEW = 20  # as in transformers


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    settings: CacheSettings,
    *,
    yarn_rope: bool = True,
    attention_forward_temp_size_gb: float = 3.0,
    **generate_arguments: Any,  # noqa: ANN401 - transformers' own
) -> Any:  # noqa: ANN401 - what transformers' generate returns
    """Read a prompt of any length in steps, then call transformers' `generate`.

    Args:
        model: see `SelectiveCache`.
        input_ids: int64 `(batch, tokens)`, padded on the left if an `attention_mask` is given.
        settings: policy, buffers, rows and steps.
        yarn_rope: whether RoPE is scaled for prompt and answer beyond the trained length.
        attention_forward_temp_size_gb: bound of attention's temporary arrays, in 10^9 bytes.
        generate_arguments: arguments of `model.generate`, including `attention_mask`.

    Returns:
        The result of `model.generate`: by default the tokens of the prompt and the answer.

    Raises:
        ConfigError: as for `SelectiveCache`, a cache among the arguments, or a model continuing
            without its cache, for example Phi-3 for an answer beyond its original length.
    """
    if generate_arguments.get("past_key_values") is not None:
        raise ConfigError("generate makes the cache: leave past_key_values out")
    if generate_arguments.get("use_cache") is False:
        raise ConfigError("generate reads through a cache: leave use_cache out")
    _refuse_rereading(model, generate_arguments)
    instance("input_ids", input_ids, torch.Tensor)
    if input_ids.dim() != 2 or not input_ids.shape[1]:  # noqa: PLR2004 - rows and columns
        raise ConfigError(f"input_ids are {tuple(input_ids.shape)}: rows of tokens are wanted")
    batch, prompt = input_ids.shape
    mask = generate_arguments.pop("attention_mask", None)
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}"
        )
    with SelectiveCache(
        model,
        settings,
        batch,
        yarn_rope=yarn_rope,
        attention_forward_temp_size_gb=attention_forward_temp_size_gb,
    ) as cache:
        cache.steps(prompt + _new_tokens(model, generate_arguments, prompt))
        if prompt > 1:
            cache.read(input_ids[:, :-1], mask[:, :-1])
        given = {**generate_arguments, "use_cache": True}  # overrides the model's configuration
        made = cast("Any", model).generate(
            input_ids, attention_mask=mask, past_key_values=cache, **given
        )
        length = getattr(made, "sequences", made).shape[1]
        if cache.get_seq_length() < length - 1:
            raise ConfigError(
                f"{type(model).__name__} went on without the cache that it was given, after "
                f"{cache.get_seq_length()} of {length} tokens: its rotation changes there; ask for "
                "fewer new tokens, or read a prompt that is beyond this length"
            )
        if hasattr(made, "past_key_values"):
            made.past_key_values = None  # the cache is closed after this call
        return made


def _refuse_rereading(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """Refuse generation modes with a separate read of the prompt or with removal of tokens.

    Raises:
        ConfigError: an assistant, prompt lookup, or a prompt of embeddings.
    """
    config = vars(given.get("generation_config") or model.generation_config)
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if given.get(name, config.get(name)) is not None:
            raise ConfigError(
                f"generate with {name} takes tokens back, and rows that made room for them are "
                f"gone: leave {name} out"
            )
    if given.get("inputs_embeds") is not None:
        raise ConfigError("generate reads input_ids in steps: leave inputs_embeds out")


def _new_tokens(model: PreTrainedModel, given: dict[str, Any], prompt: int) -> int:
    """Return the largest number of tokens of the answer."""
    for source in (given, vars(given.get("generation_config") or model.generation_config)):
        if source.get("max_new_tokens") is not None:
            return int(source["max_new_tokens"])
        if source.get("max_length") is not None:
            return max(0, int(source["max_length"]) - prompt)
    return _DEFAULT_NEW
