"""SelectiveCache: a transformers `Cache` that reads a context of any length in fixed memory.

It goes wherever transformers takes a cache. Each layer's `KVCache` attends by itself; the model's
passes are otherwise transformers' own. Long prompts are read in steps: by `read`, or pass by pass
in the lengths that `steps` gives.
Invariant: all layers have seen the same tokens, but for a pass that failed midway, after which the
cache is refused; other passes of the model are bit for bit as they were.
Cost: memory by the number of rows; see `KVCache`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Cache

from kvtrie.argument import flag, instance, whole
from kvtrie.engines.fingerprint import fingerprint
from kvtrie.engines.guard import Guard, columns, named, no_gradients
from kvtrie.engines.model_state import ModelState
from kvtrie.errors import ClosedError, ConfigError
from kvtrie.selective.attention import Passing, running
from kvtrie.selective.buffers import WorkingCopy
from kvtrie.selective.continuation import ReadTokens, unwatch, watch
from kvtrie.selective.names import make_cache, windows_of
from kvtrie.selective.padding import first_columns
from kvtrie.selective.park import Blocks, park_blocks
from kvtrie.selective.rope import FixedRope
from kvtrie.selective.settings import CacheSettings
from kvtrie.selective.steps import cut, too_long
from kvtrie.selective.trial import trial
from kvtrie.shape import ModelShape
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from kvtrie.selective.cache import KVCacheWithBuffers

__all__ = ["Parked", "SelectiveCache"]


class SelectiveCache(Cache):
    """The rows of a batch of sequences in every layer of a model.

    Args:
        model: a decoder with rotary positions like Llama's, Mistral's, Qwen2's, Qwen3's, Gemma's or
            gpt-oss's. Layers with full attention get the policy; those with a window keep it.
        settings: policy, buffers, rows and steps.
        batch: batch rows.
        yarn_rope: whether RoPE is scaled for sequences longer than the model was trained for, once,
            by the length that `steps` or `generate` is given, or else the first pass. A model
            whose own RoPE depends on the length is rotated for that length in any case, and
            passes beyond what such a rotation covers are refused.
        attention_forward_temp_size_gb: bound of attention's temporary arrays, in 10^9 bytes.

    Attributes:
        caches: the `KVCache` of each layer.

    Raises:
        ConfigError: settings that cannot be, or a model whose layers are of another kind.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: CacheSettings,
        batch: int = 1,
        *,
        yarn_rope: bool = True,
        attention_forward_temp_size_gb: float = 3.0,
    ) -> None:
        super().__init__(layers=[])
        instance("settings", settings, CacheSettings)
        flag("yarn_rope", yarn_rope)
        shape = _shape(model)
        lengths = settings.cache_length
        if isinstance(lengths, int):
            lengths = [lengths] * shape.layers
        if len(lengths) != shape.layers:
            raise ConfigError(f"{len(lengths)} cache lengths for a model of {shape.layers} layers")
        working = WorkingCopy()
        self.settings = settings
        windows = windows_of(shape)
        self.caches: list[KVCacheWithBuffers] = [
            make_cache(
                settings.name,
                batch=batch,
                kv_heads=shape.kv_heads,
                query_heads=shape.query_heads or shape.kv_heads,
                cache_length=length,
                head_dim=shape.head_dim,
                dtype=model.dtype,
                device=model.device,
                span=windows.get(at),
                working=working,
                tmp_array_limit_gb=attention_forward_temp_size_gb,
                **settings.cache_kwargs,
            )
            for at, length in enumerate(lengths)
        ]
        self._model = model
        self._guard = Guard(model)
        self._batch = self._opened = batch
        self._temp_size_gb = attention_forward_temp_size_gb
        self._torn = False
        self._read = ReadTokens()
        self._state: ModelState | None = None  # of the model, in the passes that were read
        # Of the pass that runs: columns before it, its tokens, its rows and columns.
        self._arriving: tuple[int, torch.Tensor | None, int, int] | None = None
        self._yarn_rope = yarn_rope
        self._rope: FixedRope | None = None
        decoder: Any = cast("Any", model).get_decoder()
        self._config: Any = decoder.config
        self._passing = Passing(self._config)
        self._rotary: torch.nn.Module = decoder.rotary_emb
        hooks = [
            decoder.register_forward_pre_hook(_weakly(self._before), with_kwargs=True),
            decoder.register_forward_hook(_weakly(self._after), always_call=True),
            self._rotary.register_forward_hook(_weakly(self._turned), with_kwargs=True),
        ]
        self._end_of_life = weakref.finalize(self, _let_go, hooks, self.caches, watch(model))
        self._end_of_life.atexit = False
        try:
            trial(model, self._dense)
        except BaseException:
            self.close()
            raise

    def _dense(self, rows: int) -> SelectiveCache:
        """An exact cache of the same model, for a comparison with passes without one."""
        return SelectiveCache(self._model, CacheSettings("dense-default", rows), yarn_rope=False)

    # ------------------------------------------------------------------------------ reading

    def steps(self, total: int) -> list[int]:
        """Lengths of the passes from here on to `total` tokens, padding included.

        Before the first pass this also says how long the sequence will be; see `yarn_rope`.

        Raises:
            ConfigError: more tokens than a dense cache holds, or than RoPE is fixed for.
        """
        self._open()
        total = whole("total", total, 0, 2**31 - 1)
        found = cut(self.caches, self.settings, self.get_seq_length(), total)
        self._expect(total).check(total)
        return found

    @torch.no_grad()
    def read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Take tokens in, step by step.

        Args:
            input_ids: int64 `(batch, n)`, what follows the tokens that the cache has seen.
            attention_mask: `(batch, all columns up to these)`, 0 before each row's first token;
                None goes on with the padding of the passes before.

        Returns:
            The logits after the last token, `(batch, vocabulary)`.

        Raises:
            ConfigError: as for a pass.
        """
        self._open()
        start = self.get_seq_length()
        instance("input_ids", input_ids, torch.Tensor)
        if input_ids.dim() != 2 or not input_ids.shape[1]:  # noqa: PLR2004 - rows and columns
            raise ConfigError(f"input_ids are {tuple(input_ids.shape)}: rows of tokens are wanted")
        columns = None
        first = self.caches[0].first
        if attention_mask is None and first is not None and start:
            places = torch.arange(start + input_ids.shape[1], device=first.device)
            attention_mask = (places >= first[:, None]).long()
        if attention_mask is not None:
            columns = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        logits = input_ids
        lo = start
        total = start + input_ids.shape[1]
        if self._rope is None:
            self._expect(total)
        for step in cut(self.caches, self.settings, start, total):
            given: dict[str, Any] = {"input_ids": input_ids[:, lo - start : lo - start + step]}
            if attention_mask is not None and columns is not None:
                given["attention_mask"] = attention_mask[:, : lo + step]
                given["position_ids"] = columns[:, lo : lo + step]
            out: Any = self._model(past_key_values=self, logits_to_keep=1, **given)
            logits = out.logits[:, -1]
            lo += step
        return logits

    def _expect(self, total: int) -> FixedRope:
        """Fix RoPE for sequences of `total` tokens, if no key was rotated yet."""
        if self._rope is None or self.get_seq_length() == 0:
            self._rope = FixedRope(self._rotary, self._config, total, yarn=self._yarn_rope)
        return self._rope

    def goes_on_from(self, rope: FixedRope | None, read: ReadTokens) -> None:
        """Take the RoPE that the keys were rotated by, and the tokens that were read."""
        self._rope = rope
        self._read.take(read)

    @property
    def rope_factor(self) -> float:
        """By what RoPE is scaled; 1 leaves it as the model has it."""
        return 1.0 if self._rope is None else self._rope.factor

    # ------------------------------------------------------------------------- a pass's hooks

    def _before(
        self,
        decoder: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Before a pass of the model: if it is one over this cache, let attention come here."""
        # torch gives none to a hook that another thread adds or removes during this thread's pass.
        if kwargs is None:
            return
        given = named(decoder, args, kwargs)
        if given.get("past_key_values") is not self:
            return
        self._after()  # of a pass that was interrupted before its end
        self._open()
        self._guard.ready()
        no_gradients(decoder, given)
        self._passing.begin(self)
        try:
            self._admit(given)
        except BaseException:
            self._passing.end()
            raise

    def _admit(self, given: dict[str, Any]) -> None:
        """Prepare the layers' caches for a pass, or refuse the pass and change nothing."""
        ids = given.get("input_ids")
        if ids is None:
            ids = given.get("inputs_embeds")
        if ids is None:
            raise ConfigError("a pass has neither input_ids nor inputs_embeds")
        batch, new = ids.shape[:2]
        past, times = self.get_seq_length(), batch // self._batch
        state = ModelState.of(self._model)
        if past and self._state is not None and not state.same(self._state):
            raise ConfigError(
                f"the model has changed since this cache read its {past} tokens: reset() the "
                "SelectiveCache or open another"
            )
        if batch % self._batch:
            raise ConfigError(self._other_batch(batch))
        first = first_columns(
            given.get("attention_mask"), batch, past, new, self.caches[0].first, times
        )
        pad = ids.new_zeros(batch, dtype=torch.int64) if first is None else first
        if columns(given, new, past, pad.to(ids.device)):
            raise ConfigError(
                f"a pass of {new} tokens from position 0 on, and this cache has read {past}: pass "
                "only what follows them; assisted generation and prompt lookup begin so, and take "
                "tokens back, which no cache does that evicts"
            )
        most = self.largest_step
        if not most:
            raise too_long(self.caches, past, past + new)
        if not 0 < new <= most:
            raise ConfigError(
                f"a pass of {new} tokens after {past}, and the next step of this cache has 1 to "
                f"{most}: let kvtrie.selective.generate or SelectiveCache.read cut it"
            )
        (self._rope or self._expect(new)).check(past + new - int(pad.min()))
        if times > 1:
            self.batch_repeat_interleave(times)
        for cache in self.caches:
            cache.pad(first)
        self._state = state
        self._arriving = past, given.get("input_ids"), batch, new

    def check_prompt(
        self, ids: torch.Tensor | None, mask: torch.Tensor | None, *, embedded: bool
    ) -> None:
        """Refuse a prompt of transformers' `generate` that does not continue what was read.

        Args:
            ids: int64 `(rows, columns)`: all columns, or with a longer mask those that are new.
            mask: `(rows, all columns)`; None where the prompt has none.
            embedded: whether the prompt is given as embeddings.

        Raises:
            ConfigError: other tokens than were read, no more than those, or none that is known.
        """
        self._open()
        past = self.get_seq_length()
        if not past or (ids is not None and mask is not None and mask.shape[1] > ids.shape[1]):
            return
        if ids is None or embedded:
            raise ConfigError(
                f"the cache has read {past} tokens: generate continues them by a prompt of tokens, "
                "with those that were read at its start"
            )
        if ids.dim() != 2 or ids.shape[1] <= past:  # noqa: PLR2004 - rows and columns
            raise ConfigError(
                f"a prompt of {tuple(ids.shape)} does not continue a cache that has read {past} "
                "columns: reset() the SelectiveCache or open another"
            )
        self._read.check(ids, past, self.caches[0].first)

    def _other_batch(self, batch: int) -> str:
        if self.get_seq_length():
            return f"a batch of {batch} does not continue {self._batch} rows"
        return (
            f"a batch of {batch} for a SelectiveCache of {self._batch} rows: open one with "
            f"batch={batch}"
        )

    def _after(self, *_: object) -> None:
        """Runs after a pass, also one that failed."""
        if running(self) and self._passing.end():
            read = {cache.input_pos for cache in self.caches}
            self._torn = len(read) > 1
            arriving, self._arriving = self._arriving, None
            if arriving is not None and read != {arriving[0]}:
                self._read.append(*arriving[1:])

    def _turned(self, _: torch.nn.Module, *given_to_it: Any) -> object:  # noqa: ANN401 - torch's
        """Hook of the rotary module: gives other tables in passes over this cache."""
        # Three, but without keywords while another thread adds or removes this hook.
        if self._rope is None or not running(self) or len(given_to_it) != 3:  # noqa: PLR2004
            return None
        args, kwargs, _out = given_to_it
        names = ("x", "position_ids", "layer_type")
        given = dict(zip(names, args, strict=False)) | kwargs
        return self._rope.rotation(given["x"], given["position_ids"], given.get("layer_type"))

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass K and V of the new tokens on to attention, which gives them to the layer's cache.

        Raises:
            ConfigError: attention that is not this cache's: the model was called in another way.
        """
        if not running(self) or layer_idx >= len(self.caches):
            raise ConfigError(
                f"layer {layer_idx} came outside of a pass of the model that the cache was opened "
                "for"
            )
        return key_states, value_states

    # ------------------------------------------------------------------- what transformers asks

    def __len__(self) -> int:
        return len(self.caches)

    def __repr__(self) -> str:
        if not self._end_of_life.alive:
            return "SelectiveCache(closed)"
        rows = sorted({cache.cache_length for cache in self.caches})
        return f"SelectiveCache({self.settings.name}, {rows} rows, {self.get_seq_length()} tokens)"

    @property
    def largest_step(self) -> int:
        """Tokens that the next pass may have."""
        return min(cache.largest_step for cache in self.caches)

    @property
    def is_croppable(self) -> bool:
        """Whether nothing was evicted yet."""
        return not any(cache.evicted for cache in self.caches)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that were read, padding included; not the rows that are kept."""
        return self.caches[layer_idx].input_pos

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Sizes of transformers' mask: all tokens read. Rows are masked by their positions."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """-1: sequences may have any length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens: transformers gives a negative number.

        Raises:
            ConfigError: rows were evicted for them, or there are fewer.
        """
        self._open()
        if tokens_to_remove > 0:
            raise ConfigError(f"cannot crop by {tokens_to_remove}: a number below 0 wanted")
        for cache in self.caches:  # all can, or the first that cannot says so before any did
            cache.check_crop(-tokens_to_remove)
        for cache in self.caches:
            cache.crop(-tokens_to_remove)
        self._read.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget everything, the scaling of RoPE included; the batch is again the one opened."""
        self._alive()
        rows = torch.arange(self._opened) % self._batch
        for cache in self.caches:
            if self._batch != self._opened:
                cache.select(rows)
            cache.reset()
        self._batch = self._opened
        self._read.clear()
        self._rope = None
        self._torn = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue row `i` of the batch from what row `beam_idx[i]` was."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every row go on as `repeats` neighbouring ones."""
        self._select(torch.arange(self._batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices`, or where it is True."""
        self._select(torch.arange(self._batch)[indices.cpu()])

    def _select(self, rows: torch.Tensor) -> None:
        self._open()
        for cache in self.caches:
            cache.select(rows)
        self._read.select(rows)
        self._batch = len(rows)

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another cache of the same model with the same rows; the two go on independently."""
        self._open()
        lengths = tuple(cache.cache_length for cache in self.caches)
        made = type(self)(
            self._model,
            replace(self.settings, cache_length=lengths),
            self._batch,
            yarn_rope=self._yarn_rope,
            attention_forward_temp_size_gb=self._temp_size_gb,
        )
        made.settings = self.settings
        made._opened, made._state = self._opened, self._state  # noqa: SLF001 - of the same class
        made.goes_on_from(self._rope, self._read)
        for mine, other in zip(self.caches, made.caches, strict=True):
            tensors, numbers = mine.state()
            other.load_state({name: each.clone() for name, each in tensors.items()}, numbers)
        memo[id(self)] = made
        return made

    def shrink(self, cache_length: int | Sequence[int]) -> None:
        """Have fewer rows from now on, one number or one per layer; the least worth go.

        A layer with a window keeps it.

        Raises:
            ConfigError: more rows than there are, or too few.
        """
        self._open()
        if isinstance(cache_length, Sequence):
            given = list(cache_length)
        else:
            given = [cache_length] * len(self.caches)
        lengths = [whole("cache_length", each, 0, 2**31 - 1) for each in given]
        if len(lengths) != len(self.caches):
            raise ConfigError(f"{len(lengths)} cache lengths for {len(self.caches)} layers")
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.check_shrink(length)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.shrink(length)

    def park(self, executor: Executor) -> Parked:
        """Let the cache wait as blocks of a manager, below its first tier, and close it.

        Args:
            executor: of the manager; its tiers below the first take the blocks as they have room.

        Raises:
            ConfigError: one tier only, or tiers that convert bytes.
            NoSpaceError: the first tier has no room to pass through; the cache stays open.
        """
        self._open()
        instance("executor", executor, Executor)
        name = fingerprint(self._model)
        reach = None if self._rope is None else self._rope.reach
        about = f"{name} {self.settings} {self._batch} {self.rope_factor} {reach}"
        blocks = park_blocks(executor, self.caches, about)
        parked = Parked(
            blocks, self.settings, self._batch, name, self._rope, self._yarn_rope, self._read
        )
        self.close()
        return parked

    def close(self) -> None:
        """Leave the model as it was and give the memory back. Closing twice does nothing."""
        self._passing.end()
        self._end_of_life()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _alive(self) -> None:
        if not self._end_of_life.alive:
            raise ClosedError("the SelectiveCache is closed: open another")

    def _open(self) -> None:
        self._alive()
        if self._torn:
            raise ClosedError(
                "a pass over this SelectiveCache ended midway: reset() or open another"
            )


class Parked:
    """A selective cache that waits on lower tiers; see `SelectiveCache.park`.

    It can be resumed any number of times, each time into another cache, until it is dropped.
    """

    def __init__(  # noqa: PLR0917 - made by `park` alone
        self,
        blocks: Blocks,
        settings: CacheSettings,
        batch: int,
        model: str,
        rope: FixedRope | None,
        yarn_rope: bool,  # noqa: FBT001
        read: ReadTokens,
    ) -> None:
        self._read = read
        self._blocks = blocks
        self._settings = settings
        self._batch = batch
        self._model = model
        self._rope = rope
        self._yarn_rope = yarn_rope

    def resume(self, model: PreTrainedModel) -> SelectiveCache | None:
        """The cache as it was, bit for bit; None if any of its blocks was evicted.

        Raises:
            ConfigError: another model.
            ClosedError: it was dropped before, by `drop` or because a block was evicted.
            NoSpaceError: the first tier has no room now; the cache goes on waiting.
        """
        if (name := fingerprint(model)) != self._model:
            raise ConfigError(f"the cache was parked by {self._model!r}, this is {name!r}")
        lengths = tuple(numbers["cache_length"] for _, numbers in self._blocks.layers)
        settings = replace(self._settings, cache_length=lengths)
        made = SelectiveCache(model, settings, self._batch, yarn_rope=self._yarn_rope)
        there = False
        try:
            there = self._blocks.load(made.caches)
        finally:
            if not there:
                made.close()
        if not there:
            return None
        made.settings = self._settings
        made.goes_on_from(self._rope, self._read)
        return made

    def drop(self) -> None:
        """Give its room back. Dropping twice does nothing."""
        self._blocks.drop()


def _shape(model: PreTrainedModel) -> ModelShape:
    try:
        shape = ModelShape.from_config(model.config)
    except ConfigError as error:
        raise ConfigError(
            f"{type(model).__name__} is no decoder that selective caches take, such as Llama's, "
            f"Mistral's, Qwen's, Gemma's and gpt-oss's: {error}"
        ) from error
    kinds = sorted({group.kind for group in shape.groups} - {"full", "sliding"})
    decoder: Any = cast("Any", model).get_decoder()
    name = type(decoder).__name__
    if kinds or shape.latent:
        raise ConfigError(
            f"{name} has layers of kind {', '.join(kinds) or 'latent'}: selective caches choose "
            "among all tokens of layers with full attention, and keep windows"
        )
    if not hasattr(decoder, "rotary_emb") or not getattr(model, "_supports_attention_backend", 0):
        raise ConfigError(
            f"{name} has no rotary_emb, or attention that cannot be exchanged: selective caches "
            "take decoders like Llama's, Mistral's, Qwen's, Gemma's and gpt-oss's"
        )
    return shape


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls a method as long as its object lives."""
    method_of = weakref.WeakMethod(method)

    def hook(*given: object) -> object:
        found = method_of()
        return None if found is None else found(*given)

    return hook


def _let_go(
    hooks: list[RemovableHandle],
    caches: list[KVCacheWithBuffers],
    watched: list[torch.nn.Module],
) -> None:
    """Hold nothing any more: neither memory nor a place in the model."""
    unwatch(watched)
    for hook in hooks:
        hook.remove()
    for cache in caches:
        cache.buffers.deallocate()
