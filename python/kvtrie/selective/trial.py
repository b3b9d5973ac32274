"""Trial: a short check whether a model's attention equals the attention of selective caches.

Configurations do not describe every detail: layers may add terms to attention, subtract two
softmaxes or make their own masks. A model is checked when its first cache is opened.
Invariant: a few tokens, read in two passes over a dense cache, give the same output as without a
cache. The pass without a cache and concurrent passes over selective caches of the model exclude
each other.
Cost: three short passes per model object.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.engines.identity.model_state import ModelCache
from kvtrie.errors import ConfigError
from kvtrie.selective.attention import between_passes

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

__all__ = ["trial"]

_FIRST, _ALL = 8, 12  # tokens of the first pass, and of both
_APART = 0.02
"""Largest rounding difference, as a share of the largest number."""

_tried: ModelCache[bool] = ModelCache()
# Errors of a layer when attention is not the expected function.
_UNFIT = (AttributeError, IndexError, KeyError, TypeError, ValueError, NotImplementedError)


@torch.no_grad()
def trial(model: PreTrainedModel, dense: Callable[[int], Any]) -> None:
    """Check a model, unless it is unchanged since a successful check.

    Args:
        model: a model in any mode. Dropout is disabled.
        dense: opens a cache without evictions for a number of tokens.

    Raises:
        ConfigError: the model's output over a dense cache differs from its output without a cache.
    """
    decoder: Any = cast("Any", model).get_decoder()
    with between_passes(decoder.config):  # passes exchange the model's attention
        if _tried.get(decoder):
            return
        _tried.put(decoder, True)  # noqa: FBT003 - the dense cache is of the same model
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        _compare(decoder, dense)
    except BaseException:
        _tried.forget(decoder)
        raise
    finally:
        for module in training:
            module.training = True


def _compare(decoder: Any, dense: Callable[[int], Any]) -> None:  # noqa: ANN401 - a module
    device = next(decoder.parameters()).device
    ids = (torch.arange(1, _ALL + 1, device=device) % decoder.config.vocab_size)[None]
    with between_passes(decoder.config):
        wanted = decoder(input_ids=ids, use_cache=False).last_hidden_state
    found: list[torch.Tensor] = []
    with dense(_ALL) as cache:
        for part in (ids[:, :_FIRST], ids[:, _FIRST:]):
            try:
                found.append(decoder(input_ids=part, past_key_values=cache).last_hidden_state)
            except (ConfigError, *_UNFIT) as error:
                raise ConfigError(
                    f"{type(decoder).__name__} does not run over a selective cache: {error}"
                ) from error
    apart = (torch.cat(found, dim=1) - wanted).float().abs().max()
    allowed = max(_APART, torch.finfo(wanted.dtype).eps ** 0.5) * wanted.float().abs().max()
    if not apart <= allowed:
        raise ConfigError(
            f"attention of {type(decoder).__name__} is more than a causal softmax: over a dense "
            f"cache its outputs differ by {apart:.3g}, and rounding explains {allowed:.3g}"
        )
