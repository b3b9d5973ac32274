"""SelectiveCache: a transformers `Cache` for contexts of any length in fixed memory.

It can be used as any cache of transformers. Each layer's `KVCache` computes attention. The rest of
a pass is transformers' own, and `Passes` hooks into each pass. Long prompts are read in steps: by
`read`, or pass by pass in the lengths from `steps`.
Invariant: all layers have read the same tokens, except after a pass that failed midway. Then the
cache is refused. Passes without the cache are unchanged bit for bit.
Cost: memory by the number of rows, see `KVCache`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (transformers leaves parts untyped)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Cache

from kvtrie.engines.identity.fingerprint import fingerprint
from kvtrie.errors import ConfigError
from kvtrie.selective.attention import running
from kvtrie.selective.decoder_caches import decoder_caches
from kvtrie.selective.layers import LayerCaches
from kvtrie.selective.park import Blocks, park_blocks
from kvtrie.selective.passes import Passes
from kvtrie.selective.rope import SequenceRope
from kvtrie.selective.settings import CacheSettings
from kvtrie.selective.steps import cut
from kvtrie.selective.trial import trial
from kvtrie.settings.argument import flag, instance, whole
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedModel

    from kvtrie.selective.buffered import KVCacheWithBuffers
    from kvtrie.selective.continuation import ReadTokens
    from kvtrie.selective.rope import FixedRope

__all__ = ["Parked", "SelectiveCache"]


class SelectiveCache(Cache):
    """The rows of a batch of sequences in every layer of a model.

    Args:
        model: a decoder with rotary positions like Llama's, Mistral's, Qwen2's, Qwen3's, Gemma's or
            gpt-oss's. Layers with full attention use the policy, layers with a window their window.
        settings: policy, buffers, rows and steps.
        batch: batch rows.
        yarn_rope: whether RoPE is scaled for sequences beyond the model's trained length. The
            scale is fixed by the length given to `steps` or `generate`, or else by the first pass.
            RoPE depending on the length by the model's own rule always uses this length, and
            passes beyond its range are refused.
        attention_forward_temp_size_gb: bound of attention's temporary arrays, in 10^9 bytes.

    Attributes:
        caches: the `KVCache` of each layer.

    Raises:
        ConfigError: invalid settings, or a model with unsupported layers.
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
        self.settings = settings
        self.caches: list[KVCacheWithBuffers] = decoder_caches(
            model, settings, batch, attention_forward_temp_size_gb
        )
        self._model = model
        self._temp_size_gb = attention_forward_temp_size_gb
        self._yarn_rope = yarn_rope
        decoder: Any = cast("Any", model).get_decoder()
        rope = SequenceRope(decoder.rotary_emb, decoder.config, yarn=yarn_rope)
        self._layers = LayerCaches(self.caches, batch, rope)
        self._passes = Passes(model, decoder, self, self._layers)
        try:
            trial(model, self._dense)
        except BaseException:
            self.close()
            raise

    def _dense(self, rows: int) -> SelectiveCache:
        """Return an exact cache of the same model, for the comparison with uncached passes."""
        return SelectiveCache(self._model, CacheSettings("dense-default", rows), yarn_rope=False)

    # ------------------------------------------------------------------------------ reading

    def steps(self, total: int) -> list[int]:
        """Return the lengths of the next passes up to `total` tokens, including padding.

        Before the first pass this also fixes the length of the sequence for RoPE, see `yarn_rope`.

        Raises:
            ConfigError: more tokens than the rows of a dense cache or than RoPE is fixed for.
        """
        self._passes.check_open()
        total = whole("total", total, 0, 2**31 - 1)
        found = cut(self.caches, self.settings, self.get_seq_length(), total)
        self._layers.rope.fix(total, self._layers.length).check(total)
        return found

    @torch.no_grad()
    def read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Read tokens, step by step.

        Args:
            input_ids: int64 `(batch, n)`, the next tokens.
            attention_mask: `(batch, all columns up to these)`, 0 before each row's first token.
                None keeps the padding of the previous passes.

        Returns:
            The logits after the last token, `(batch, vocabulary)`.

        Raises:
            ConfigError: as for a pass.
        """
        self._passes.check_open()
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
        if self._layers.rope.fixed is None:
            self._layers.rope.fix(total, start)
        for step in cut(self.caches, self.settings, start, total):
            given: dict[str, Any] = {"input_ids": input_ids[:, lo - start : lo - start + step]}
            if attention_mask is not None and columns is not None:
                given["attention_mask"] = attention_mask[:, : lo + step]
                given["position_ids"] = columns[:, lo : lo + step]
            out: Any = self._model(past_key_values=self, logits_to_keep=1, **given)
            logits = out.logits[:, -1]
            lo += step
        return logits

    def goes_on_from(self, rope: FixedRope | None, read: ReadTokens) -> None:
        """Set the RoPE of the stored keys and the tokens read."""
        self._layers.rope.fixed = rope
        self._layers.read.take(read)

    @property
    def rope_factor(self) -> float:
        """Scale of RoPE, 1 for the model's own RoPE."""
        return self._layers.rope.factor

    # ------------------------------------------------------------------- what transformers asks

    def check_prompt(
        self, ids: torch.Tensor | None, mask: torch.Tensor | None, *, embedded: bool
    ) -> None:
        """Refuse a prompt of transformers' `generate` unless it continues the tokens read.

        Args:
            ids: int64 `(rows, columns)`: all columns, or with a longer mask the new columns.
            mask: `(rows, all columns)`, None for a prompt without mask.
            embedded: whether the prompt is given as embeddings.

        Raises:
            ConfigError: different tokens, no new token, or embeddings instead of tokens.
        """
        self._passes.check_open()
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
        self._layers.read.check(ids, past, self.caches[0].first)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the new tokens unchanged. Attention writes them to the layer's cache.

        Raises:
            ConfigError: called outside of a pass of this cache's model.
        """
        if not running(self._layers) or layer_idx >= len(self.caches):
            raise ConfigError(
                f"layer {layer_idx} came outside of a pass of the model that the cache was opened "
                "for"
            )
        return key_states, value_states

    def __len__(self) -> int:
        return len(self.caches)

    def __repr__(self) -> str:
        if not self._passes.alive:
            return "SelectiveCache(closed)"
        rows = sorted({cache.cache_length for cache in self.caches})
        return f"SelectiveCache({self.settings.name}, {rows} rows, {self.get_seq_length()} tokens)"

    @property
    def largest_step(self) -> int:
        """Largest number of tokens of the next pass."""
        return self._layers.largest_step

    @property
    def is_croppable(self) -> bool:
        """Whether no row was evicted yet."""
        return not any(cache.evicted for cache in self.caches)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, including padding and evicted tokens."""
        return self.caches[layer_idx].input_pos

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the sizes of transformers' mask: all tokens. Rows are masked by position."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        """Return -1: sequences may have any length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. transformers passes a negative number.

        Raises:
            ConfigError: rows were evicted, or fewer tokens were read.
        """
        self._passes.check_open()
        if tokens_to_remove > 0:
            raise ConfigError(f"cannot crop by {tokens_to_remove}: a number below 0 wanted")
        self._layers.crop(-tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens and the scaling of RoPE, and restore the initial batch size."""
        self._passes.check_alive()
        self._passes.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace each row `i` of the batch by row `beam_idx[i]`."""
        self._passes.check_open()
        self._layers.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace every row by `repeats` adjacent copies."""
        self._passes.check_open()
        self._layers.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at `indices`, or the rows with True."""
        self._passes.check_open()
        self._layers.select(torch.arange(self._layers.batch)[indices.cpu()])

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy of the cache for the same model."""
        self._passes.check_open()
        lengths = tuple(cache.cache_length for cache in self.caches)
        made = type(self)(
            self._model,
            replace(self.settings, cache_length=lengths),
            self._layers.batch,
            yarn_rope=self._yarn_rope,
            attention_forward_temp_size_gb=self._temp_size_gb,
        )
        made.settings = self.settings
        made._layers.take(self._layers)  # noqa: SLF001 - of the same class
        memo[id(self)] = made
        return made

    def shrink(self, cache_length: int | Sequence[int]) -> None:
        """Reduce the number of rows, to a number for all layers or a number per layer.

        Each policy chooses the rows to evict. A layer with a window keeps it.

        Raises:
            ConfigError: more rows than now, or too few rows.
        """
        self._passes.check_open()
        if isinstance(cache_length, Sequence):
            given = list(cache_length)
        else:
            given = [cache_length] * len(self.caches)
        lengths = [whole("cache_length", each, 0, 2**31 - 1) for each in given]
        self._layers.shrink(lengths)

    def park(self, executor: Executor) -> Parked:
        """Store the cache as blocks of a manager below its first tier, and close it.

        Args:
            executor: executor of the manager. The blocks go to the tiers below the first.

        Raises:
            ConfigError: a manager with a single tier, or tiers with a different KV format.
            NoSpaceError: the first tier has no room for the transfer. The cache stays open.
        """
        self._passes.check_open()
        instance("executor", executor, Executor)
        name = fingerprint(self._model)
        layers = self._layers
        rope = layers.rope.fixed
        reach = None if rope is None else rope.reach
        about = f"{name} {self.settings} {layers.batch} {self.rope_factor} {reach}"
        blocks = park_blocks(executor, self.caches, about)
        parked = Parked(
            blocks, self.settings, layers.batch, name, rope, self._yarn_rope, layers.read
        )
        self.close()
        return parked

    def close(self) -> None:
        """Restore the model and release the memory. Idempotent."""
        self._passes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Parked:
    """A selective cache stored on lower tiers, see `SelectiveCache.park`.

    It can be resumed any number of times, each time into a new cache, until it is dropped.
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
        """Return a bit-identical copy of the parked cache, or None if a block was evicted.

        Raises:
            ConfigError: a different model.
            ClosedError: it was dropped before, by `drop` or after the eviction of a block.
            NoSpaceError: the first tier has no room now. The cache stays parked.
        """
        if (name := fingerprint(model)) != self._model:
            raise ConfigError(f"the cache was parked by {self._model!r}, this is {name!r}")
        lengths = tuple(numbers["cache_length"] for _, numbers in self._blocks.layers)
        settings = replace(self._settings, cache_length=lengths)
        made = SelectiveCache(model, settings, self._batch, yarn_rope=self._yarn_rope)
        loaded = False
        try:
            loaded = self._blocks.load(made.caches)
        finally:
            if not loaded:
                made.close()
        if not loaded:
            return None
        made.settings = self._settings
        made.goes_on_from(self._rope, self._read)
        return made

    def drop(self) -> None:
        """Release its blocks. Idempotent."""
        self._blocks.drop()
