"""Trial: a model and a store in which cases are fused and held against the model's full prefill.

The chunks of a case are computed alone after the shared prefix and stored on the first tier before
anything is timed. The answer is teacher-forced: one pass over its tokens, after the fused cache
and in the full prefill.
Invariant: every setting of a case reads the same chunks' KV. Cost: two full prefills a case, then
per setting its share of one; a context's KV twice in memory.
"""

from __future__ import annotations

from time import process_time
from typing import TYPE_CHECKING

import torch

from benches.eval_fusion.cases import PREFIX, TEXT_QUERY
from benches.eval_fusion.settings import Record
from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.engines.transformers import Decoder, fingerprint
from kvtrie.fuse import CacheStore, Context, Fusor, Monitor
from kvtrie.fuse.chunker import Given
from kvtrie.tiers import default_device, open_pools
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benches.eval_fusion.cases import Case, Sizes
    from benches.eval_fusion.settings import Setting
    from kvtrie.demo.model import Speaker

BLOCK = 16
LONGEST_QUERY = 64
FACTS_ANSWER = 16


class Trial:
    """A model with room for one case at a time; a context manager.

    Args:
        speaker: the model.
        sizes: of the cases.

    Attributes:
        world: the model and the sizes, which are part of a record's key.
        layers: of the model.
    """

    def __init__(self, speaker: Speaker, sizes: Sizes) -> None:
        model = speaker.model
        torch.nn.Module.to(model, default_device())  # the first tier is on that device
        self.world = f"{speaker.name}, {sizes.chunks} x {sizes.chunk}, answer {sizes.answer}"
        self._model = model
        self._decoder = Decoder(model)
        self.layers = self._decoder.layers
        dtype = str(model.dtype).removeprefix("torch.")
        shape = ModelShape.from_config(model.config, dtype=dtype, fingerprint=fingerprint(model))
        prefix = speaker.tokens(PREFIX)
        after = LONGEST_QUERY + TEXT_QUERY + max(sizes.answer, FACTS_ANSWER)
        chunk_blocks = -(-(sizes.chunk + len(prefix)) // BLOCK) * sizes.chunks
        fused = -(-(len(prefix) + sizes.chunks * sizes.chunk + after) // BLOCK)
        tiers = [Tier("gpu", blocks=2 * chunk_blocks + fused + sizes.chunks)]
        manager = BlockManager(shape, tiers, block_tokens=BLOCK)
        self._executor = Executor(manager, list(open_pools(shape, tiers, BLOCK)))
        self._store = CacheStore(self._executor, Given(), prefix=prefix)

    def close(self) -> None:
        """Give the memory back."""
        self._executor.close()

    def measure(self, case: Case, settings: Iterable[Setting]) -> Iterator[Record]:
        """One record per setting, each as soon as it is measured."""
        context = Context(case.chunks, case.query)
        with Fusor(self._decoder, self._store, ratio=0.0).fuse(context) as fused:
            ids = fused.ids  # and every chunk is there from now on
        self._executor.drain()
        answer = torch.as_tensor([case.answer], device=ids.device)
        given = answer[:, :-1]
        began = process_time()
        truth = self._logs(torch.cat([ids, given], dim=1), len(case.answer))
        # The pass over the answer is no part of a prefill.
        full = (process_time() - began) * ids.shape[1] / (ids.shape[1] + given.shape[1])
        for setting in settings:
            fusor = self._fusor(setting)
            began = process_time()
            with fusor.fuse(context) as fused:
                seconds = process_time() - began
                tokens = torch.cat([ids[:, -1:], given], dim=1)
                mine = self._logs(tokens, len(case.answer), fused.cache)
                apart = (truth.exp() * (truth - mine)).sum(dim=-1).mean()
                yield Record(
                    self.world,
                    case.kind,
                    case.seed,
                    str(setting),
                    kl=max(0.0, float(apart)),
                    same=float((truth.argmax(dim=-1) == mine.argmax(dim=-1)).double().mean()),
                    seconds=seconds,
                    full=full,
                    computed=fused.log.computed,
                    score=fused.quality.score,
                )
            self._executor.poll()

    def _fusor(self, setting: Setting) -> Fusor:
        # It never raises the ratio, or a case would depend on those before it.
        monitor = Monitor(rate=0.0, threshold=0.0, probe=setting.probe) if setting.probe else None
        pair = setting.rank_layers
        return Fusor(
            self._decoder,
            self._store,
            select=setting.select,
            ratio=setting.ratio,
            at=setting.at,
            rank_layers=None if pair is None else range(pair[0], pair[1] + 1),
            monitor=monitor,
        )

    @torch.no_grad()
    def _logs(self, ids: torch.Tensor, keep: int, cache: object = None) -> torch.Tensor:
        """Logarithms of the probabilities of the last `keep` tokens' next ones, fp64."""
        logits = self._model(
            ids, past_key_values=cache, logits_to_keep=keep, use_cache=cache is not None
        )
        return logits.logits[0].double().log_softmax(dim=-1)
