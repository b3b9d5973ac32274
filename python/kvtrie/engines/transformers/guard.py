"""Guard: refuses passes with KV that would depend on more than tokens.

KV is looked up by tokens alone. If a pass also depended on custom positions, custom masks, images
or dropout, it would serve wrong KV to the next request.
Invariant: arguments not known to be harmless are refused before the pass runs.
Cost: a check of each argument, module and position of a pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules import module as module_globals

from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from transformers import PreTrainedModel

    from kvtrie.tiers import Pool

__all__ = ["Guard", "Pass", "columns", "named", "no_gradients", "remainder", "states"]

_READ = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position"})
# Arguments affecting only the output of a pass, as do all with the prefix "output_".
_RETURNS = frozenset({"past_key_values", "use_cache", "return_dict", "logits_to_keep"})


# Arguments with an effect even if False.
_STATED = frozenset({"is_causal"})
# Arguments of media encoded by generate() before the first pass.
_MEDIA = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
# Packages with hooks that depend on weights and inputs only: kvtrie, pruning and parallelism of
# torch, output capture of transformers, weight placement of accelerate.
_STEADY = ("kvtrie.", "torch.nn.utils.", "torch.distributed.", "transformers.", "accelerate.")


# Models attending to all tokens in a pass, but only to a window of transformers' own cache. The
# answer to a longer prompt depends on how it was split into passes.
_TORN = frozenset({"moshi"})
_NO_GRADIENTS = (
    "cached K and V carry no gradient, so weights would silently miss theirs: run the model under "
    "torch.no_grad(), or train without this cache"
)


@dataclass(frozen=True, slots=True)
class Pass:
    """A checked pass.

    Attributes:
        ids: int64 `(batch, queries)`, its tokens.
        length: tokens of its longest row, cached tokens included.
        repeats: columns at its start already in the cache.
    """

    ids: torch.Tensor
    length: int
    repeats: int


class Guard:
    """Checks the arguments and settings of a model's passes.

    Args:
        model: the model to check.

    Attributes:
        fills: whether the model can compute tokens in holes at any length. Otherwise its KV belongs
            into scopes of structure "leaf-only".

    Raises:
        ConfigError: the model takes no `position_ids`, is not causal, or depends on the split of a
            prompt into passes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = cast("Any", model).get_decoder()
        forward = inspect.signature(model.base_model.forward).parameters
        if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in forward.values()):
            forward = inspect.signature(decoder.forward).parameters  # the base only wraps it
        if "position_ids" not in forward:
            raise ConfigError(
                f"{type(model.base_model).__name__} takes no position_ids, so its tokens cannot be "
                "computed in holes, nor are their positions known"
            )
        for name, module in cast("Iterable[tuple[str, object]]", decoder.named_modules()):
            causal = getattr(module, "is_causal", True) and getattr(module, "is_decoder", True)
            if causal is False:
                raise ConfigError(
                    f"{name} of {type(model.base_model).__name__} sees later tokens as well, so "
                    "KV of a prefix depends on what follows: only causal models can share it"
                )
        config: Any = cast("Any", model.config).get_text_config(decoder=True)
        if config.model_type in _TORN:
            raise ConfigError(
                f"{type(model.base_model).__name__} attends beyond its window of "
                f"{config.sliding_window} tokens within a pass and not after transformers' own "
                "cache, so its answers depend on the split into passes"
            )
        # Falcon builds ALiBi from a mask of rows and columns, and holes take a mask per query.
        self.fills = not getattr(config, "alibi", False)
        tuned = getattr(config, "attn_temperature_tuning", False)
        # Llama 4 scales queries by their index in the pass, from this length on.
        self._counts_from: int | None = getattr(config, "floor_scale", None) if tuned else None
        self._model = model
        self._settings: Any = model.config
        self._device = model.device.type

    def recovers(self, length: int) -> bool:
        """Return whether the model can compute single tokens of a `length`-token sequence."""
        return self._counts_from is None or length < self._counts_from

    def check_recovery(self, length: int) -> None:
        """Refuse a length for which `recovers` is False.

        Raises:
            ConfigError: the model cannot compute single tokens at this length.
        """
        if not self.recovers(length):
            raise ConfigError(
                f"this model scales attention by columns from {self._counts_from} on, so it fills "
                f"no holes in a prompt of {length} tokens: serve it with structure 'leaf-only'"
            )

    def ready(self) -> None:
        """Refuse settings with an effect on KV: training mode, foreign hooks and autocast.

        Raises:
            ConfigError: a module is in training mode, a foreign hook is on a module or on all
                modules, or autocast is on.
        """
        modules = self._every()
        if any(module.training for module in modules):
            raise ConfigError(
                "the model is in training mode, where dropout makes KV depend on chance: call "
                "model.eval() first"
            )
        for hook in _of_all_modules():
            _refuse_foreign(hook, lambda: "all modules (a global hook)")
        for module in modules:
            for hook in _of_module(module):
                _refuse_foreign(hook, partial(self._name_of, module))
        if torch.is_autocast_enabled(self._device):
            kind = torch.get_autocast_dtype(self._device)
            raise ConfigError(
                f"autocast computes in {kind} what is cached as the model's own type: load the "
                "model in the type that you want and leave autocast"
            )

    def check(self, given: Mapping[str, Any], past: int, pads: Sequence[int]) -> Pass:
        """Check the arguments of a pass over a cache of `past` columns.

        Args:
            given: all arguments by name.
            past: columns in the cache.
            pads: per row of the cache, the columns before its first token.

        Raises:
            ConfigError: an argument does not continue the cache, or could make KV depend on more
                than tokens.
        """
        try:
            self.ready()
        except ConfigError:
            self._without_leftovers()
            raise
        if odd := [name for name, value in given.items() if self._may_change_kv(name, value)]:
            raise ConfigError(
                f"KvtrieCache names KV by tokens alone: run the model on input_ids, without "
                f"{', '.join(_by_user(name, given[name]) for name in odd)}"
            )
        ids = given.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:  # noqa: PLR2004 - rows and columns
            raise ConfigError("KvtrieCache names KV by tokens: run the model on input_ids")
        batch, queries = ids.shape
        if not ids.numel():
            raise ConfigError(
                f"no token of the pass is new: the cache holds {past} columns, so pass more; "
                "generate() takes the whole sequence, prompt and answers included, not only its "
                "new tokens, and skips what the cache holds"
            )
        if batch % len(pads):
            raise ConfigError(f"a batch of {batch} does not continue {len(pads)} rows")
        pad = torch.tensor(pads, device=ids.device).repeat_interleave(batch // len(pads))
        repeats = columns(given, queries, past, pad)
        end = past + queries - repeats
        if any(pads) and not self.recovers(end):
            raise ConfigError(
                f"this model scales attention by columns from {self._counts_from} on: a pass up to "
                f"column {end} takes no padding"
            )
        return Pass(ids, end - min(pads), repeats)

    def _every(self) -> list[torch.nn.Module]:
        """Return all current modules of the model."""
        found: list[torch.nn.Module] = []
        left: list[torch.nn.Module] = [self._model]
        while left:
            found.append(left.pop())
            left += [one for one in vars(found[-1])["_modules"].values() if one is not None]
        return found

    def _name_of(self, module: torch.nn.Module) -> str:
        modules = cast("Iterable[tuple[str, torch.nn.Module]]", self._model.named_modules())
        name = next(name for name, one in modules if one is module)
        return f"module {name!r}" if name else type(module).__name__

    def _without_leftovers(self) -> None:
        """Remove PEFT's hooks for a single call, left in place if the call raises."""
        for module in self._every():
            hooks, with_kwargs = (
                cast("dict[int, object]", vars(module)[f"_forward_pre_hooks{which}"])
                for which in ("", "_with_kwargs")
            )
            for key, hook in list(hooks.items()):
                if isinstance(hook, partial) and hook.func.__module__.startswith("peft."):
                    del hooks[key]
                    with_kwargs.pop(key, None)

    def _may_change_kv(self, name: str, value: object) -> bool:
        """Return whether an argument may change KV. Most empty or False values cannot."""
        if name in _READ or name in _RETURNS or name.startswith("output_") or value is None:
            return False
        if isinstance(value, torch.Tensor):
            # The medium of each token: 0 is text.
            return name != "mm_token_type_ids" or bool(value.any())
        if (value is False or value in ({}, [], ())) and name not in _STATED:
            return False
        return not _equal(value, getattr(self._settings, name, None))


def _equal(value: object, other: object) -> bool:
    """Return whether an argument has the type and value of the configuration."""
    return type(value) is type(other) and value == other


def _by_user(name: str, value: object) -> str:
    """Return the user's name of an argument of generate()."""
    if name != "mm_encoder_outputs" or not isinstance(value, dict):
        return name
    media = cast("dict[str, object]", value)
    return ", ".join(_MEDIA.get(medium, f"{name}[{medium!r}]") for medium in media)


def _of_all_modules() -> Iterable[object]:
    """Return the hooks called by torch for every module."""
    pre, after = (
        getattr(module_globals, f"_global_forward_{kind}") for kind in ("pre_hooks", "hooks")
    )
    return *pre.values(), *after.values()  # a copy: concurrent threads add and remove hooks


def _of_module(module: torch.nn.Module) -> Iterable[object]:
    """Return the hooks of a module's forward, accelerate's included."""
    own = vars(module)
    pre, after, placed = own["_forward_pre_hooks"], own["_forward_hooks"], own.get("_hf_hook")
    if not (pre or after or placed):
        return ()
    return *pre.values(), *after.values(), *getattr(placed, "hooks", (placed,))


def _refuse_foreign(hook: object, where: Callable[[], str]) -> None:
    while isinstance(hook, partial):
        hook = hook.func
    source: str = getattr(hook, "__module__", None) or ""
    if hook is not None and not f"{source}.".startswith(_STEADY):
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise ConfigError(
            f"{where()} has the forward hook {name} of {source or 'an unknown module'}: what a "
            "hook changes is not part of the tokens that name KV; remove the hook, or run without "
            "kvtrie (PEFT's adapter_names are such hooks: choose one adapter by set_adapter)"
        )


def columns(given: Mapping[str, Any], queries: int, past: int, pad: torch.Tensor) -> int:
    """Check the mask and positions of a pass against its columns.

    Args:
        given: all arguments by name.
        queries: columns of the pass.
        past: columns in the cache.
        pad: int64 `(batch,)`, the columns before each row's first token.

    Returns:
        Number of columns at the start of the pass already in the cache: 0 or `past`.

    Raises:
        ConfigError: the mask does not hide exactly the padding, or the positions are not the
            indices of the tokens.
    """
    tokens = torch.arange(past + queries, device=pad.device) - pad[:, None]
    mask = given.get("attention_mask")
    _hides_padding(mask, tokens)  # first, because generate() derives positions from the mask
    repeats = _positions(given.get("position_ids"), past, tokens, queries)
    end = past + queries - repeats
    columns_given = given.get("cache_position")
    if columns_given is not None and columns_given.tolist() != list(range(past - repeats, end)):
        raise ConfigError(
            f"cache_position says {columns_given.tolist()}, the pass is over columns "
            f"{past - repeats} to {end - 1}"
        )
    if mask is not None and mask.shape != (len(pad), end):
        raise ConfigError(
            f"attention_mask is {tuple(mask.shape)}, {(len(pad), end)} wanted: rows and columns, "
            "cached ones included"
        )
    return repeats


def no_gradients(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse a pass if autograd is on and a module's weights or input require gradients.

    Raises:
        ConfigError: gradients are required.
    """
    if not torch.is_grad_enabled():
        return
    embeds = given.get("inputs_embeds")
    wants_gradients = isinstance(embeds, torch.Tensor) and embeds.requires_grad
    if wants_gradients or any(weight.requires_grad for weight in module.parameters()):
        raise ConfigError(_NO_GRADIENTS)


def named(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a module's forward by name."""
    if not args:
        return dict(kwargs)
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | {**kwargs}


def remainder(given: Mapping[str, Any], start: int, stop: int | None = None) -> dict[str, Any]:
    """Return the arguments of a pass limited to its columns from `start` to `stop`."""
    shorter = {
        name: given[name][..., start:stop]
        for name in ("input_ids", "position_ids", "cache_position")
        if given.get(name) is not None
    }
    if stop is not None and given.get("attention_mask") is not None:
        mask, queries = given["attention_mask"], given["input_ids"].shape[1]
        shorter["attention_mask"] = mask[:, : mask.shape[1] - (queries - stop)]
    return {**given, **shorter}


def states(keys: torch.Tensor, values: torch.Tensor, pool: Pool) -> None:
    """Refuse K and V `(batch, heads, queries, dim)` if they differ from the pool's format.

    Raises:
        ConfigError: they require gradients, or differ in type, shape or device.
    """
    if keys.requires_grad or values.requires_grad:
        raise ConfigError(_NO_GRADIENTS)
    fmt, device = pool.block_format, pool.device.type
    dtype = getattr(torch, pool.layout.dtype)
    for name, each, dim in (("K", keys, fmt.head_dim), ("V", values, fmt.v_head_dim)):
        mine = (each.shape[1], each.shape[3], each.dtype, each.device.type)
        theirs = (fmt.heads, dim, dtype, device)
        if mine != theirs:
            raise ConfigError(
                f"(heads, dim, dtype, device) of the model's {name} are {mine}, of the first tier "
                f"{theirs}"
            )


def _positions(
    positions: torch.Tensor | None, past: int, tokens: torch.Tensor, queries: int
) -> int:
    """Return the number of cached columns a pass repeats: none, or all if positions begin at 0."""
    if positions is None:
        if int(tokens[:, 0].min()) < 0:
            raise ConfigError(
                "a model counts padding as tokens unless it gets position_ids: pass those of "
                "each row, counted from its first token"
            )
        return 0
    wanted = tokens[:, past:]
    try:
        positions = positions.broadcast_to((*positions.shape[:-2], *wanted.shape))
    except RuntimeError:
        raise ConfigError(
            f"position_ids are {tuple(positions.shape)}, for {tuple(wanted.shape)} tokens"
        ) from None
    wrong = _miscounted(positions, wanted)
    if not wrong.any():
        return 0
    if 0 < past < queries and not _miscounted(positions, tokens[:, :queries]).any():
        return past
    at: list[int] = wrong.nonzero()[0].tolist()
    raise ConfigError(
        f"position_ids say {int(positions[tuple(at)])} at token {int(wanted[at[-2], at[-1]])} of "
        f"row {at[-2]}: the cache holds {past} columns, so pass only what follows them, at the "
        "positions of its tokens"
    )


def _hides_padding(mask: object, tokens: torch.Tensor) -> None:
    """Refuse a mask that hides a token from later tokens, because it would change their KV."""
    if mask is None:
        if int(tokens[:, 0].min()) < 0:
            raise ConfigError("padded rows need an attention_mask that hides their padding")
        return
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or len(mask) != len(tokens):  # noqa: PLR2004 - rows and columns
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ConfigError(
            f"attention_mask is {shape}: KvtrieCache names KV by tokens, so a pass takes a mask of "
            f"{len(tokens)} rows and its columns, which hides padding and nothing else"
        )
    tokens = tokens[:, : mask.shape[1]]
    mask = mask[:, : tokens.shape[1]]
    wrong = ((mask != 0) != (tokens >= 0)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ConfigError(
            f"attention_mask of row {row} does not fit at token {int(tokens[row, column])}: it "
            f"hides the {-int(tokens[row, 0])} columns of padding and nothing else; generate() "
            "hides every pad token of a prompt unless it is given an attention_mask"
        )


def _miscounted(positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mark positions different from token indices. Padding may have any up to the largest."""
    return (positions != tokens) & ((tokens >= 0) | (positions > tokens.max()))
