"""vLLM's real scheduler over a runner without a model, which knows every byte that must be where.

A token's row is a number made of all tokens up to it, so that a row of another sequence, or one
that was not written or not loaded, shows wherever it is read. The next token is made of all tokens,
too. Workers are called in the order in which vLLM's own runner calls them.

With `kinds` the model has further groups of two layers, which share vLLM's memory with the first:
`w` and `n` attend to a window, `n` in blocks of half the tokens, and `s` keeps a state, the number
of the last token.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtrie.engines.vllm import KvtrieConnector
from kvtrie.engines.vllm.weights import combined
from kvtrie.engines.vllm.worker import WorkerConnector

SIZE, LAYERS, WORDS = 16, ("a", "b"), 300
PAGE = 4 * SIZE  # numbers of a layer of a block of any group
WINDOWS = {"w": 40, "n": 21}
SIZES = {"n": SIZE // 2}
DRAFTS = 3


def spec_of(kind):
    """vLLM's spec of a group of layers."""
    plain = {"num_kv_heads": 1, "dtype": torch.float32}
    if kind == "s":
        return MambaSpec(
            block_size=SIZE, shapes=((PAGE,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    size = SIZES.get(kind, SIZE)
    shape = plain | {"block_size": size, "head_size": PAGE // (2 * size)}
    if kind == "f":
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(**shape, sliding_window=WINDOWS[kind])


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
    tables: list  # by group
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
        kinds: the groups of layers after the first.
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
        kinds="",
    ):
        self.groups = {"f": LAYERS} | {
            kind: tuple(kind + each for each in LAYERS) for kind in kinds
        }
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
        if "s" in kinds:
            config.cache_config.mamba_cache_mode = "align"
        groups = [KVCacheGroupSpec([*names], spec_of(kind)) for kind, names in self.groups.items()]
        caches = KVCacheConfig(blocks, [], groups)
        hash_size = min(group.kv_cache_spec.block_size for group in groups)
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self.hasher = get_request_block_hasher(hash_size, hashed)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=SIZE,
            hash_block_size=hash_size,
        )
        self.ahead, self.guesses = ahead, drafts
        self.memory = [self.tensors(blocks) for _ in range(ranks)]
        self.received = Counter()
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

    def tensors(self, blocks):
        """Memory of a rank: a layer of each group is in the same bytes, as in vLLM's."""
        shared, made = [torch.zeros(blocks, PAGE) for _ in LAYERS], {}
        for kind, names in self.groups.items():
            for name, memory in zip(names, shared, strict=True):
                made[name] = (
                    [memory]
                    if kind == "s"
                    else memory.view(blocks, 2, SIZES.get(kind, SIZE), 1, -1)
                )
        return made

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
        for memory in self.memory:
            for name in LAYERS if output.new_block_ids_to_zero else ():
                memory[name][output.new_block_ids_to_zero] = 0
        rows = self.rows(output)
        bad, news, after = set(), None, not output.has_sync_kv_loads
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            if not after:
                worker.start_load_kv(None)
            for name in LAYERS:
                worker.wait_for_layer_load(name)
            bad |= set() if len(self.groups) > 1 else worker._worker.bad_slots()
        self.run_layers(rows, bad)
        failed, received = set(bad), ([], set())  # asking has emptied the workers' sets
        for worker in self.workers:
            if after:
                worker.start_load_kv(None)
            worker.wait_for_save()
            self.receive(worker.get_transfer_results(output.finished_req_ids), received)
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
                kv_connector_worker_meta=news,
                invalid_block_ids=failed,
                finished_recving=set(received[0]),
                failed_recving=received[1],
            ),
        )

    def receive(self, results, received):
        """Requests whose loads have ended on every rank, and those that failed on one."""
        received[1].update(results.failed_recving)
        for name in results.finished_recving or ():
            self.received[name] += 1
            if self.received[name] == len(self.workers):
                del self.received[name]
                received[0].append(name)

    def run_layers(self, rows, bad):
        """Compute the layers of all ranks; a worker is told of each but of states."""
        for at, (kind, names) in enumerate(self.groups.items()):
            for name in names:
                for rank, worker in enumerate(self.workers):
                    memory = self.memory[rank][name]
                    for played, begin, tokens in rows.values():
                        if kind == "s":
                            self.compute_state(memory[0], played.tables[at], begin, tokens)
                        else:
                            self.compute(memory, (played, at, kind), begin, tokens, bad)
                    if rows and kind != "s":
                        worker.save_kv_layer(name, memory, None)

    def rows(self, output):
        """The requests of a step: request, the first position, and all tokens with drafts."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = PlayedRequest(
                list(new.prompt_token_ids), [list(each) for each in new.block_ids]
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
                played.tables = [[] for _ in self.groups]
            for table, given in zip(played.tables, blocks or (), strict=False):
                table.extend(given)
        rows = {}
        for name, count in output.num_scheduled_tokens.items():
            played, drafts = self.requests[name], output.scheduled_spec_decode_tokens.get(name, [])
            # vLLM pads with -1, which no token is.
            guessed = [WORDS if draft < 0 else draft for draft in drafts]
            tokens = [*played.tokens, *guessed][: before[name] + count]
            assert len(tokens) == before[name] + count
            rows[name] = played, before[name], tokens
        return rows

    def compute(self, memory, where, begin, tokens, bad):
        """Read what comes before, which must be right, and write the step's own rows."""
        (played, group, kind), numbers = where, marks(tokens)
        table, size = played.tables[group], memory.shape[2]
        broken = bool(bad.intersection(table))
        seen = max(0, begin - WINDOWS[kind] + 1) if kind in WINDOWS else 0
        for block in range(seen // size, -(-len(tokens) // size)):
            slot, first = table[block], block * size
            had = min(max(begin - first, 0), size)
            wanted = torch.tensor(numbers[first : first + size])
            rows = memory[slot].movedim(1, 0)  # tokens first
            if not broken:
                read = slice(max(0, seen - first), had)
                right = rows[read] == wanted[read, None, None, None]
                assert right.all(), (played, kind, begin, block)
            new = wanted[had:, None, None, None].expand(-1, *rows.shape[1:])
            rows[had : len(wanted)] = -1.0 if broken else new

    def compute_state(self, memory, table, begin, tokens):
        """Go on from the state after the tokens before, in the block that vLLM reads."""
        numbers = marks(tokens)
        if begin:
            found = memory[table[(begin - 1) // SIZE]]
            assert (found == numbers[begin - 1]).all(), (begin, found[0])
        memory[table[(len(tokens) - 1) // SIZE]] = numbers[-1]

    def sample(self, played, tokens, failed):
        """The tokens that a request is given, and new guesses."""
        played.drafts = []
        if failed.intersection(played.tables[0]) or len(tokens) < len(played.tokens):
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
