"""vLLM's real scheduler over a runner without a model, which knows every byte that must be where.

A token's row is a number made of all tokens up to it, so that a row of another sequence, or one
that was not written or not loaded, shows wherever it is read. The next token is made of all tokens,
too. Workers are called in the order in which vLLM's own runner calls them.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtrie.engines.vllm import KvtrieConnector
from kvtrie.engines.vllm.weights import combined
from kvtrie.engines.vllm.worker import WorkerConnector

SIZE, LAYERS, WORDS = 16, ("a", "b"), 300
DRAFTS = 3


def write_model(folder):
    """Write a configuration, all that a scheduler reads of a model."""
    LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def marks(tokens):
    """The number of each token's row."""
    number, found = 0, []
    for token in tokens:
        number = zlib.crc32(token.to_bytes(4, "little"), number)
        found.append(float(number % (1 << 20) + 1))
    return found


def following(tokens):
    """The token that follows these tokens."""
    return zlib.crc32(bytes(str(tokens[-40:]), "ascii"), len(tokens)) % WORDS


def answer(prompt, tokens):
    """The answer of a request, the same for every schedule."""
    path = list(prompt)
    for _ in range(tokens):
        path.append(following(path))
    return path[len(prompt) :]


class LoadedAdapters(dict):
    """Names of the adapters that a worker without a model holds, by vLLM's numbers."""

    digests = dict.copy

    def forget(self):
        pass

    def load(self, request):
        self[request.lora_int_id] = combined([request.lora_path.encode()])


@dataclass
class PlayedRequest:
    """A request as the runner has it."""

    tokens: list
    table: list
    drafts: list = field(default_factory=list)


class Engine:
    """vLLM's scheduler, our connector, and the runner.

    Args:
        model: a folder with a model's configuration.
        extra: our settings.
        blocks: of vLLM's memory.
        ranks: workers.
        seed: of everything that is drawn.
        ahead: whether a step is scheduled before the last one is known.
        drafts: whether tokens are guessed, some of them rightly.
        policy: what vLLM does with requests whose load has failed.
        weights: a name of each rank's weights, as its worker digests them.
        events: whether vLLM publishes KV events.
    """

    def __init__(
        self,
        model,
        extra,
        *,
        blocks,
        ranks=1,
        seed=0,
        ahead=False,
        drafts=False,
        policy="fail",
        weights=b"one",
        events=False,
    ):
        self.weights = [weights] * ranks
        self.draw = random.Random(seed)
        transfer = KVTransferConfig(
            kv_connector="KvtrieConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            kv_load_failure_policy=policy,
        )
        guess = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2}
        config = EngineArgs(
            model,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=SIZE,
            max_model_len=640,
            max_num_seqs=6,
            max_num_batched_tokens=90,
            enable_chunked_prefill=True,
            kv_transfer_config=transfer,
            speculative_config=guess if drafts else None,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = ahead
        # The configuration of one rank of several, without the processes.
        config.parallel_config.tensor_parallel_size = ranks
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=2, dtype=torch.float32)
        caches = KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self.hasher = get_request_block_hasher(SIZE, hashed)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=SIZE,
            hash_block_size=SIZE,
        )
        self.ahead, self.guesses = ahead, drafts
        self.memory = [
            {name: torch.zeros(blocks, 2, SIZE, 1, 2) for name in LAYERS} for _ in range(ranks)
        ]
        self.workers = []
        for rank, tensors in enumerate(self.memory):
            worker = KvtrieConnector(config, KVConnectorRole.WORKER, caches)
            worker._worker = WorkerConnector(
                worker._settings,
                worker._model.with_weights(combined(self.weights)),
                rank,
                tensors,
                engine="modelfree",
                weights=lambda rank=rank: self.weights[rank],
                adapters=LoadedAdapters(),
            )
            worker._digest = self.weights[rank]
            worker._rank = rank
            self.workers.append(worker)
        connector = self.scheduler.get_kv_connector()
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self.kv_scheduler = connector.scheduler
        self.requests, self.under_way, self.prompts = {}, deque(), {}
        self.right, self.wrong, self.rejected = 0, [], 0

    def add(self, name, prompt, tokens, **more):
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        sampling.update_from_generation_config({}, None)
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher, **more)
        self.prompts[name] = (list(prompt), tokens, request)
        self.scheduler.add_request(request)

    def abort(self, name):
        self.prompts.pop(name)
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self):
        """Schedule a step; know what the oldest one came to."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.under_way.append([output, None])
            if self.draw.random() < 0.5:
                self.execute_all()
            if self.ahead and len(self.under_way) < 2:
                return
        if self.under_way:
            self.execute_all()
            output, result = self.under_way.popleft()
            for outputs in self.scheduler.update_from_output(output, result).values():
                for one in outputs.outputs:
                    self.on_output(one)
            if self.guesses:
                names = [name for name in output.num_scheduled_tokens if name in self.requests]
                drafts = [list(self.requests[name].drafts) for name in names]
                self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def on_output(self, output):
        """Compare an answer that is complete."""
        if output.finish_reason is None:
            return
        prompt, tokens, request = self.prompts.pop(output.request_id)
        if str(output.finish_reason) == "length":
            assert list(request.output_token_ids) == answer(prompt, tokens)
            self.right += 1
        else:
            self.wrong.append((output.request_id, str(output.finish_reason)))

    def execute_all(self):
        for each in self.under_way:
            if each[1] is None:
                each[1] = self.execute(each[0])

    def execute(self, output):
        """One step, as vLLM's runner carries it out."""
        metadata = output.kv_connector_metadata
        for worker in self.workers:
            worker.handle_preemptions(metadata)
        rows = self.rows(output)
        bad, news = set(), None
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            for name in LAYERS:
                worker.wait_for_layer_load(name)
            bad |= worker._worker.bad_slots()
        for name in LAYERS:
            for rank, worker in enumerate(self.workers):
                for played, begin, tokens in rows.values():
                    self.compute(self.memory[rank][name], played, begin, tokens, bad)
                if rows:
                    worker.save_kv_layer(name, self.memory[rank][name], None)
        failed = set(bad)  # asking has emptied the workers' sets
        for worker in self.workers:
            worker.wait_for_save()
            failed |= worker.get_block_ids_with_load_errors()
            mine = worker.build_connector_worker_meta()
            news = mine if news is None else news.aggregate(mine)
            worker.clear_connector_metadata()
        sampled = [self.sample(played, tokens, failed) for played, _, tokens in rows.values()]
        return ModelRunnerOutput(
            req_ids=list(rows),
            req_id_to_index={name: at for at, name in enumerate(rows)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                kv_connector_worker_meta=news, invalid_block_ids=failed
            ),
        )

    def rows(self, output):
        """The requests of a step: request, the first position, and all tokens with drafts."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = PlayedRequest(
                list(new.prompt_token_ids), list(new.block_ids[0])
            )
        cached = output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            before[name], played = computed, self.requests[name]
            if name in cached.all_token_ids:
                played.tokens = list(cached.all_token_ids[name])
            if name in cached.resumed_req_ids:
                played.table = []
            played.table += blocks[0] if blocks else []
        rows = {}
        for name, count in output.num_scheduled_tokens.items():
            played, drafts = self.requests[name], output.scheduled_spec_decode_tokens.get(name, [])
            # vLLM pads with -1, which no token is.
            guessed = [WORDS if draft < 0 else draft for draft in drafts]
            tokens = [*played.tokens, *guessed][: before[name] + count]
            assert len(tokens) == before[name] + count
            rows[name] = played, before[name], tokens
        return rows

    def compute(self, memory, played, begin, tokens, bad):
        """Read what comes before, which must be right, and write the step's own rows."""
        numbers = marks(tokens)
        broken = bool(bad.intersection(played.table))
        for block in range(-(-len(tokens) // SIZE)):
            slot, first = played.table[block], block * SIZE
            had = min(max(begin - first, 0), SIZE)
            wanted = torch.tensor(numbers[first : first + SIZE])
            rows = memory[slot].movedim(1, 0)  # tokens first
            if not broken:
                assert (rows[:had] == wanted[:had, None, None, None]).all(), (played, begin, block)
            new = wanted[had:, None, None, None].expand(-1, 2, 1, 2)
            rows[had : len(wanted)] = -1.0 if broken else new

    def sample(self, played, tokens, failed):
        """The tokens that a request is given, and new guesses."""
        played.drafts = []
        if failed.intersection(played.table) or len(tokens) < len(played.tokens):
            return []
        given, guessed = [], tokens[len(played.tokens) :]
        while True:
            given.append(following([*played.tokens, *given]))
            if len(given) > len(guessed) or given[-1] != guessed[len(given) - 1]:
                break
        self.rejected += len(guessed) - (len(given) - 1)
        played.tokens += given
        if self.guesses:
            path = list(played.tokens)
            for _ in range(DRAFTS):
                right = self.draw.random() < 0.7
                path.append(following(path) if right else self.draw.randrange(WORDS))
            played.drafts = path[len(played.tokens) :]
        return given

    def drain(self):
        for _ in range(5000):
            if not (self.scheduler.has_requests() or self.under_way):
                return
            self.step()
        moves = self.kv_scheduler.cache.moves.dispatch.pending
        raise AssertionError(f"{len(self.prompts)} requests and {moves} moves")

    def close(self):
        """End all, and see that nothing is held or under way and that the books are right."""
        self.drain()
        stats = self.kv_scheduler.manager.stats()
        assert (stats.leases, stats.moves, self.kv_scheduler.requests.pins.blocks) == (0, 0, 0)
        self.kv_scheduler.manager.audit()
        assert not self.prompts
        for worker in self.workers:
            worker.shutdown()
