"""Names of caches: `{policy}-{buffers}`, and the creation of a layer's cache by name.

A policy is built in, or a user's class by its import path `package.module:Name`.

Invariant: any policy can be combined with any buffers, except that some policies need buffers with
codes. Cost: none.
"""

from __future__ import annotations

import math
from importlib import import_module
from inspect import isabstract
from typing import TYPE_CHECKING, Any, cast

import torch

from kvtrie.errors import ConfigError
from kvtrie.selective import policies, small
from kvtrie.selective.arguments import CacheArguments
from kvtrie.selective.attn_weights import AttnWeightsKVCache
from kvtrie.selective.buffered import KVCacheWithBuffers
from kvtrie.selective.buffers import DefaultBuffers, KVCacheBuffers, Place, WorkingCopy
from kvtrie.selective.coded import PagedBuffers, TorchQuantized
from kvtrie.selective.foreign import BitsAndBytes, TorchAo
from kvtrie.selective.mix import mixed
from kvtrie.selective.window import WindowKVCache
from kvtrie.settings.argument import instance, real, shown, text, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtrie.model.shape import ModelShape

__all__ = ["BUFFERS", "make_cache", "parse", "policy_names", "register", "windows_of"]

_POLICIES: dict[str, type[KVCacheWithBuffers]] = {
    "dense": policies.DenseKVCache,
    "lastrec": policies.LastRecentlyInsertedKVCache,
    "h2o": policies.H2OKVCache,
    "qh2o": policies.QuantizedH2OKVCache,
    "h2o-vlen": policies.VLengthH2OKVCache,
    "qh2o-vlen": policies.QuantizedVLengthH2OKVCache,
    "h2o-orig": policies.H2OOriginalKVCache,
    "keydiff": small.KeyDiff,
    "knorm": small.KeyNorm,
    "tova": small.Tova,
    "snapkv": small.SnapKV,
    "expected": small.Expected,
    "h2o-decay": small.Decay,
    "random": small.Random,
}
_NEED_CODES = frozenset({"qh2o", "qh2o-vlen"})
_BUFFERS: dict[str, Callable[[Place, WorkingCopy], KVCacheBuffers]] = {
    "default": lambda place, _: DefaultBuffers(place),
    "torch-quantized8": lambda place, working: TorchQuantized(place, working, bits=8),
    "torch-quantized4": lambda place, working: TorchQuantized(place, working, bits=4),
    "int8": lambda place, working: PagedBuffers(place, working, cell="int8"),
    "fp8": lambda place, working: PagedBuffers(place, working, cell="float8_e4m3fn"),
}
BUFFERS = tuple(_BUFFERS)
"""Buffer strategies for all devices."""

_ON_CARDS: dict[str, Callable[[Place, WorkingCopy], KVCacheBuffers]] = {
    "ao-quantized8": lambda place, working: TorchAo(place, working, bits=8),
    "ao-quantized4": lambda place, working: TorchAo(place, working, bits=4),
    "bnb-quantized8": lambda place, working: BitsAndBytes(place, working, bits=8),
    "bnb-quantized4": lambda place, working: BitsAndBytes(place, working, bits=4),
}


def policy_names() -> tuple[str, ...]:
    """Return the names of the policies. `mix-A+B` combines any two policies with scores."""
    return tuple(_POLICIES)


def register(name: str, policy: type[KVCacheWithBuffers]) -> None:
    """Register a user's policy under a name.

    Raises:
        ConfigError: the name is taken or not allowed in `{policy}-{buffers}`, or the policy is no
            subclass of `KVCacheWithBuffers`.
    """
    if not issubclass(instance("policy", policy, type), KVCacheWithBuffers):
        raise ConfigError(f"policy is {shown(policy)}, a subclass of KVCacheWithBuffers wanted")
    if text("name", name) in _POLICIES or name.startswith("mix-") or "+" in name or not name:
        raise ConfigError(f"{name!r} cannot be a policy's name: it is taken or has a meaning")
    _POLICIES[name] = policy


def parse(name: str) -> tuple[type[KVCacheWithBuffers], str, str]:
    """Return the policy's class and name, and the buffers' name.

    Raises:
        ConfigError: an unknown policy or unknown buffers, or a policy with buffers it cannot use.
    """
    text("name", name)
    for buffers in (*_BUFFERS, *_ON_CARDS):
        if not name.endswith(f"-{buffers}"):
            continue
        policy = name.removesuffix(f"-{buffers}")
        kind = _policy(policy)
        parts = policy.removeprefix("mix-").split("+")
        if buffers == "default" and not _NEED_CODES.isdisjoint(parts):
            raise ConfigError(
                f"{policy} weighs the errors of codes, which exact buffers do not make: take "
                f"{policy}-torch-quantized8, say"
            )
        return kind, policy, buffers
    raise ConfigError(
        f"{name!r} is no {{policy}}-{{buffers}}: buffers are {', '.join((*BUFFERS, *_ON_CARDS))}"
    )


def _policy(name: str) -> type[KVCacheWithBuffers]:
    if name in _POLICIES:
        return _POLICIES[name]
    if ":" in name and not name.startswith("mix-"):
        return _imported(name)
    if name.startswith("mix-") and name.count("+") == 1:
        parts = [_policy(each) for each in name.removeprefix("mix-").split("+")]
        if all(issubclass(part, AttnWeightsKVCache) for part in parts):
            one, other = parts
            return mixed(name, one, other)  # pyright: ignore[reportArgumentType]
        raise ConfigError(f"{name} mixes policies that score, dense and lastrec do not")
    raise ConfigError(
        f"no policy {name!r}: {', '.join(_POLICIES)} and mix-A+B are known, and "
        "'package.module:Name' is a class of yours"
    )


def _imported(path: str) -> type[KVCacheWithBuffers]:
    """Return the class at `package.module:Name`.

    Raises:
        ConfigError: it cannot be imported, or is no policy.
    """
    module, _, name = path.partition(":")
    try:
        found = cast("object", getattr(import_module(module), name))
    except Exception as error:  # a user's module may raise any exception
        raise ConfigError(
            f"policy {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, KVCacheWithBuffers)) or isabstract(found):
        shown_as = shown(cast("object", found))
        raise ConfigError(
            f"policy {path!r} is {shown_as}, a subclass of KVCacheWithBuffers wanted, with all "
            "abstract methods"
        )
    return found


def windows_of(shape: ModelShape) -> dict[int, int]:
    """Return the window, in tokens, of each layer with a window."""
    return {
        layer: group.window
        for group in shape.groups
        if group.kind == "sliding"
        for layer in group.layers
    }


def make_cache(
    name: str,
    *,
    batch: int,
    kv_heads: int,
    query_heads: int,
    cache_length: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scale: float | None = None,
    span: int | None = None,
    working: WorkingCopy | None = None,
    tmp_array_limit_gb: float = 3.0,
    **cache_kwargs: Any,  # noqa: ANN401 - of many types, each checked
) -> KVCacheWithBuffers:
    """Return a layer's cache.

    Args:
        name: `{policy}-{buffers}`.
        batch: batch rows.
        kv_heads: heads of K and V.
        query_heads: a multiple of `kv_heads`.
        cache_length: rows per batch row and KV head.
        head_dim: numbers per head.
        dtype: format of K and V.
        device: device of the rows.
        scale: factor of the products of queries and keys. None takes `head_dim ** -0.5`.
        span: tokens of the layer's window, kept instead of `cache_length` rows of the policy. None
            for full attention.
        working: the working copy shared by the layers of a model. None makes a new copy.
        tmp_array_limit_gb: bound of attention's temporary arrays, in 10^9 bytes.
        cache_kwargs: arguments of the policy, see `CacheArguments`.

    Raises:
        ConfigError: an unknown policy or buffers, arguments missing in the policy, numbers out of
            range, or buffers without the required GPU or library.
    """
    kind, _, buffers = parse(name)
    shape = (
        whole("batch", batch, 1, 2**31 - 1),
        whole("kv_heads", kv_heads, 1, 2**31 - 1),
        whole("cache_length", cache_length, 1, 2**31 - 1),
        whole("head_dim", head_dim, 1, 2**31 - 1),
    )
    whole("query_heads", query_heads, kv_heads, 2**31 - 1)
    arguments = CacheArguments.of(cache_kwargs)
    arguments.check(kind.accepts, parse(name)[1], cache_length)
    if not instance("dtype", dtype, torch.dtype).is_floating_point:
        raise ConfigError(f"dtype is {dtype}, one of floating point wanted")
    if scale is not None:
        real("scale", scale, 0.0, math.inf)
    real("tmp_array_limit_gb", tmp_array_limit_gb, 0.0, math.inf)
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {shown(device)}: {str(error).splitlines()[0]}") from error
    if span is not None:
        rows = whole("span", span, 1, 2**31 - 1)
        window = Place((*shape[:2], rows, shape[3]), dtype, where)
        return WindowKVCache(window, query_heads, tmp_array_limit_gb=tmp_array_limit_gb)
    place = Place(shape, dtype, where)
    made = {**_BUFFERS, **_ON_CARDS}[buffers](place, WorkingCopy() if working is None else working)
    return kind(made, query_heads, arguments, scale=scale, tmp_array_limit_gb=tmp_array_limit_gb)
