"""Models whose groups of layers are kept apart give the answers that they give without kvtrie."""

import copy

import pytest
import torch
import transformers
from grouped_serving import BLOCK, allowed, apart, ask, has_states, push, serve, some
from kept import memory_folder
from tinymodels import agree, answer, before
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvtrie import ModelShape, ResumePoints
from kvtrie.demo.families import FAMILIES, VOCABULARY, family
from kvtrie.engines import transformers as engine
from kvtrie.engines.transformers import KvtrieCache, model_shape
from kvtrie.engines.transformers.open_model import close_executor
from kvtrie.errors import ClosedError, ConfigError, NoSpaceError

pytestmark = pytest.mark.engine

RESUME = dict.fromkeys(("gemma-3", "gpt-oss"), ResumePoints())  # which `open` would keep together
FEW = {"gemma-3", "lfm2", "deepseek-v3"}  # windows, states, latent KV


def families(names, few=FEW):
    """Families of which `make test` plays a few."""
    return [pytest.param(name, marks=[] if name in few else pytest.mark.deep) for name in names]


APART = [name for name in FAMILIES if name != "deepseek-v3"]


@pytest.fixture(scope="module", params=families(FAMILIES))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return family(name)


def test_sessions_of_one_system_prompt_go_on_in_little_room(model):
    states = has_states(model)
    executor = serve(model, gpu=24 if states else 18, host=200, points=5 if states else 3)
    system = some(0, 1, 21)
    chats, found = [system] * 3, 0
    for turn in range(3):
        push(model, executor, 2 * turn, blocks=13)
        for at in range(3):
            ids = torch.cat([chats[at], some(10 * turn + at, 1, 5 + 4 * at + turn)], dim=1)
            chats[at], (matched,) = ask(model, executor, ids)
            found += matched
    executor.drain()
    executor.manager.audit()
    stats = executor.manager.stats().tiers
    assert found > 100
    assert stats["host"].promoted > 0
    executor.close()


def test_a_prompt_that_leaves_a_known_path_finds_its_branch_the_second_time(model):
    executor = serve(model)
    stem = some(1, 1, 3 * BLOCK + 3)
    found = [
        ask(model, executor, torch.cat([stem, some(seed, 1, 14)], dim=1))[1][0]
        for seed in (2, 3, 4)
    ]
    assert found[::2] == [0, 3 * BLOCK]
    executor.close()


def test_holes_are_not_for_passes_that_go_front_to_back():
    model = family("gemma-3")
    executor = serve(model, structure="holes")
    ids = some(10, 1, 4 * BLOCK + 3)
    found = [ask(model, executor, torch.cat([ids, some(11, 1, 3)], dim=1))[1][0] for _ in range(2)]
    assert found == [0, 4 * BLOCK]
    with pytest.raises(ConfigError, match="in a leaf-only scope"):
        executor.manager.mark(ids[0].numpy(), "gpu", present=False, now=10**18, skip=2)
    executor.close()


def test_padded_rows_of_different_matches_meet_at_one_column(model):
    executor = serve(model, gpu=60)
    long = some(5, 1, 4 * BLOCK + 5)
    ask(model, executor, long)
    columns = long.shape[1] + 6
    rows = [torch.cat([long[0], some(6, 6)]), some(7, 2 * BLOCK + 1), some(8, 1), some(9, columns)]
    ids = torch.stack([torch.nn.functional.pad(row, (columns - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(columns) >= columns - len(row)).long() for row in rows])
    _, found = ask(model, executor, ids, attention_mask=mask)
    assert found == [4 * BLOCK, 0, 0, 0]
    _, found = ask(model, executor, ids, attention_mask=mask)
    assert found[3] > 0
    executor.manager.audit()
    executor.close()


def test_a_cache_goes_on_over_several_turns(model):
    executor = serve(model, gpu=60)
    ids = some(11, 1, 2 * BLOCK + 3)
    truth = answer(model, ids)
    with KvtrieCache(model, executor, ids, reserve=80) as cache:
        mine = answer(model, ids, cache)
        agree(truth, mine)
        for seed in (12, 13):
            ids = torch.cat([truth.sequences, some(seed, 1, 2 * BLOCK + 5)], dim=1)
            truth, mine = answer(model, ids), answer(model, ids, cache)
            agree(truth, mine)
            assert apart(truth, mine) < allowed(model, ids, truth)
    longer = torch.cat([truth.sequences, some(14, 1, 3)], dim=1)
    _, (found,) = ask(model, executor, longer)
    assert found >= (truth.sequences.shape[1] - 1) // BLOCK * BLOCK
    executor.close()


class Widths(TorchFunctionMode):
    """Notes how many tokens each pass has; another `forward` would make another model."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.embedding:
            self.seen.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def widths():
    with Widths() as mode:
        yield mode.seen


def test_passes_over_states_end_where_a_state_is_kept_and_nowhere_else(widths):
    model = family("qwen3-next")
    executor = serve(model, gpu=80)

    def passes(ids, cache):
        widths.clear()
        mine = answer(model, ids, cache, steps=1)
        taken = list(widths)
        agree(answer(model, ids, steps=1), mine)
        return taken

    ids = some(50, 1, 6 * BLOCK + 3)
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        assert widths[-1:] == [6 * BLOCK]  # after those that try the model
        assert passes(ids, cache) == [3]
        # A turn more in the same cache: up to its last full block, and the rest.
        ids = torch.cat([ids, some(51, 1, 5 * BLOCK + 1)], dim=1)
        assert passes(ids, cache) == [5 * BLOCK - 3, 4]
    ids = torch.cat([ids, some(52, 1, 4 * BLOCK + 4)], dim=1)
    widths.clear()
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        assert cache.leases[0].matched == 11 * BLOCK
        assert widths == [4 * BLOCK]  # where a repeat of the prompt goes on
        assert passes(ids, cache) == [BLOCK]
    _, (found,) = ask(model, executor, torch.cat([ids, some(53, 1, 2)], dim=1))
    assert found == ids.shape[1] == 16 * BLOCK
    executor.manager.audit()
    executor.close()


@pytest.mark.parametrize("name", families(APART))
def test_loads_that_fail_in_any_group_only_shorten_the_match(name):
    model = family(name)
    executor = serve(model, gpu=20, host=200, points=6)
    sequence, _ = ask(model, executor, some(15, 1, 6 * BLOCK))
    for pool in executor.pools[0].groups:
        push(model, executor, 6)

        def failing(*_, pool=pool):
            del pool.copy_from
            raise OSError("unreadable")

        pool.copy_from = failing
        ask(model, executor, torch.cat([sequence, some(16, 1, 3)], dim=1), steps=3)
        assert "copy_from" not in vars(pool)
        executor.manager.audit()
    executor.close()


def test_an_answer_that_is_preempted_goes_on(model):
    executor = serve(model, gpu=20, host=200, points=6)
    ids = some(17, 1, 3 * BLOCK + 5)
    truth = answer(model, ids, steps=12)
    with KvtrieCache(model, executor, ids, reserve=5) as cache:
        first = answer(model, ids, cache, steps=5)
    push(model, executor, 6)
    with KvtrieCache(model, executor, first.sequences, reserve=7) as cache:
        assert cache.leases[0].matched == 4 * BLOCK
        rest = answer(model, first.sequences, cache, steps=7)
    rest.logits = first.logits + rest.logits
    agree(truth, rest)
    assert apart(truth, rest) < allowed(model, ids, truth)
    assert executor.manager.stats().tiers["host"].promoted >= 4
    executor.close()


@pytest.mark.grid
@pytest.mark.parametrize("place", ["disk", "remote"])
@pytest.mark.parametrize("name", families(APART, {"gemma-3", "falcon-h1"}))
def test_chats_go_on_from_files_and_after_a_restart(name, place, tmp_path):
    model = family(name)
    states = has_states(model)
    system = some(0, 1, 21)
    chats = [torch.cat([system, some(at + 1, 1, 9 + 4 * at)], dim=1) for at in range(3)]
    for process in range(2):
        points = 5 if states else 3
        rooms = {"gpu": 24 if states else 18, "host": 18 if place == "disk" else 40}
        executor = serve(model, **rooms, points=points, **{place: tmp_path})
        restored, loaded = executor.restore(), 0
        for turn in range(2):
            for at in range(3):
                more = some(100 * process + 10 * turn + at, 1, 4 + turn)
                chats[at], (found,) = ask(model, executor, torch.cat([chats[at], more], dim=1))
                loaded += found
        executor.save()
        executor.drain()
        executor.manager.audit()
        assert loaded > 100
        if place == "disk":
            promoted = executor.manager.stats().tiers["disk"].promoted
            assert (restored > 0) == (promoted > 0) == (process == 1)
        else:  # they come to host memory first
            results = executor.pools[-1].stats().results
            assert results["put", "ok"] > 0
            assert results.get(("get", "ok"), 0) > 0 or process == 0
        close_executor(executor)


def test_no_room_changes_nothing(model):
    executor = serve(model, gpu=12, points=2)
    with pytest.raises(NoSpaceError):
        KvtrieCache(model, executor, some(30, 1, 60 * BLOCK))
    executor.manager.audit()
    assert executor.manager.stats().leases == 0
    executor.close()


@pytest.mark.parametrize("name", families(APART))
def test_what_takes_tokens_back_is_refused(name):
    model = family(name)
    executor = serve(model)
    ids = some(31, 1, 20)
    with KvtrieCache(model, executor, ids, reserve=8) as cache:
        cache.crop(0)
        with pytest.raises(ConfigError, match="cannot crop by -1 columns"):
            cache.crop(-1)
        with pytest.raises(ConfigError, match="generate without an assistant"):
            cache.activate_past_recording()
    with pytest.raises(ClosedError):
        cache.get_mask_sizes(1, 0)
    executor.close()


def test_a_pass_that_breaks_off_ends_the_cache():
    model = family("qwen3-next")
    executor = serve(model)
    ids = some(32, 1, 20)
    cache = KvtrieCache(model, executor, ids, reserve=8)
    layer = model.model.layers[-1]
    with before(layer, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        answer(model, ids, cache)
    with pytest.raises(ClosedError, match="ended amid its layers"):
        answer(model, ids, cache)
    cache.close()
    ask(model, executor, ids)
    executor.manager.audit()
    executor.close()


def test_the_shape_of_layers_is_what_they_hand_over():
    latent = model_shape(family("deepseek-v3"))
    assert (latent.kv_heads, latent.head_dim, latent.v_head_dim, latent.groups) == (1, 16, 8, ())
    assert latent == ModelShape.from_config(family("deepseek-v3").config)
    shared = model_shape(family("gemma-4-shared"))
    assert [group.layers for group in shared.groups] == [(2,), (0, 1, 3)]
    both = model_shape(family("falcon-h1")).groups
    assert [(group.kind, group.layers) for group in both] == [
        ("full", (0, 1, 2, 3)),
        ("state", (0, 1, 2, 3)),
    ]


def test_a_transformers_without_layers_that_keep_nothing_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr("kvtrie.engines.transformers.layer_trial.NO_CACHE", None)
    refused = rf"transformers {transformers.__version__} has no DummyLayer.*install 5\.23"
    executor = serve(family("qwen3-next"))
    with pytest.raises(ConfigError, match=refused):
        KvtrieCache(family("qwen3-next"), executor, some(39, 1, 20))
    assert executor.manager.stats().leases == 0
    executor.close()
    with pytest.raises(ConfigError, match=refused):
        engine.open(family("qwen3-next"), gpu="1MB", host=None)
    with pytest.raises(ConfigError, match=refused):
        engine.open(family("gemma-3"), gpu="1MB", host=None, resume=ResumePoints())
    # All layers of all tokens need none.
    engine.open(family("gemma-3"), gpu="1MB", host=None).close()


def test_a_manager_of_another_shape_is_refused_with_both():
    model = family("qwen3-next")
    executor = serve(model, shaped=family("lfm2"))
    with pytest.raises(ConfigError, match=r"keep .*state:0-2:state_bytes=6144.*state:0,2"):
        KvtrieCache(model, executor, some(33, 1, 20))
    executor.close()


def test_a_model_that_forgets_its_state_is_refused_by_its_layer():
    model = copy.deepcopy(family("lfm2"))
    conv = model.model.layers[2].conv
    forward = type(conv).forward

    def forgetting(self, *args, past_key_values=None, **kwargs):
        if past_key_values is not None:
            past_key_values.layers[2].has_previous_state[0] = False
        return forward(self, *args, past_key_values=past_key_values, **kwargs)

    conv.forward = forgetting.__get__(conv)
    with pytest.raises(ConfigError, match=r"whose cache differs is [23]"):
        model_shape(model)


def test_a_model_that_restarts_is_read_token_by_token():
    model = copy.deepcopy(family("lfm2"))
    conv = model.model.layers[2].conv
    forward = type(conv).forward

    def restarting(self, hidden_states, *args, past_key_values=None, **kwargs):
        if past_key_values is not None and hidden_states.shape[1] > 1:
            past_key_values.layers[2].has_previous_state[0] = False
        return forward(self, hidden_states, *args, past_key_values=past_key_values, **kwargs)

    conv.forward = restarting.__get__(conv)
    executor = serve(model)
    sequence, _ = ask(model, executor, some(34, 1, 2 * BLOCK + 3))
    _, (found,) = ask(model, executor, torch.cat([sequence, some(35, 1, 7)], dim=1))
    assert found == 3 * BLOCK
    executor.close()


@pytest.mark.parametrize("name", ["qwen3-next", "deepseek-v3", "mimo-v2-flash"])
def test_open_serves_it_by_itself(name):
    model = family(name)
    ids = some(36, 1, 30)
    truth = answer(model, ids)
    with engine.open(model, gpu="1MB", host="1MB", block_tokens=BLOCK) as served:
        for _ in range(2):
            with served.cache(ids, reserve=8) as cache:
                agree(truth, answer(model, ids, cache))
                found = cache.leases[0].matched
        assert found == 24


def test_open_finds_a_disk_again(name, model, tmp_path, capfd):
    ids = some(36, 1, 30)
    truth = answer(model, ids)
    tiers = {"gpu": "1MB", "host": "1MB", "disk": f"{tmp_path}:9MB", "block_tokens": BLOCK}
    chat = truth.sequences[0].numpy()
    for found in (0, 32):
        with engine.open(model, **tiers, resume=RESUME.get(name)) as served:
            manager = served.executor.manager
            assert manager.lookup(chat, now=served.executor.clock()).tokens == found
            with served.cache(ids, reserve=8) as cache:
                assert bool(cache.layers) == (name in APART)
                mine = answer(model, ids, cache)
            agree(truth, mine)
            assert apart(truth, mine) < allowed(model, ids, truth)
            with pytest.raises(ConfigError, match="cannot be written"):
                engine.open(model, **tiers, resume=RESUME.get(name))
    lines = capfd.readouterr().err.splitlines()
    assert " 0 % filled by an earlier run" in lines[0]
    assert "blocks of another model ignored" not in lines[1]


@pytest.mark.parametrize("name", ["gemma-3", "qwen3-next"])
def test_open_finds_kept_host_memory_again(name, capfd):
    model, ids = family(name), some(38, 1, 30)
    truth = answer(model, ids)
    chat = truth.sequences[0].numpy()
    with memory_folder() as folder:
        tiers = {"gpu": "1MB", "host": "1MB", "keep": f"{folder}/kv", "block_tokens": BLOCK}
        for found in (0, 32):
            with engine.open(model, **tiers, resume=ResumePoints()) as served:
                manager = served.executor.manager
                assert manager.lookup(chat, now=served.executor.clock()).tokens == found
                with served.cache(ids, reserve=8) as cache:
                    mine = answer(model, ids, cache)
                agree(truth, mine)
                assert apart(truth, mine) < allowed(model, ids, truth)
    lines = capfd.readouterr().err.splitlines()
    assert f"{folder}/kv" in lines[0]


def test_groups_are_kept_apart_where_that_is_asked_for():
    model = family("gemma-3")
    with engine.open(model, gpu="1MB", host=None, resume=ResumePoints()) as served:
        assert served.cache(some(37, 1, 20)).layers
    with engine.open(model, gpu="1MB", host=None) as served:
        assert not served.cache(some(37, 1, 20)).layers
    with engine.open(_llama(), gpu="1MB", host=None, resume=ResumePoints()) as served:
        assert not served.cache(some(37, 1, 20)).layers


def _llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
    )
    return LlamaForCausalLM(config).eval()


def test_beams_and_copies_share_blocks(model):
    executor = serve(model, gpu=80, points=20)
    ids = some(40, 1, 2 * BLOCK + 3)
    truth = answer(model, ids, num_beams=3)
    with KvtrieCache(model, executor, ids, reserve=16) as cache:
        agree(truth, answer(model, ids, cache, num_beams=3))
    executor.manager.audit()
    truth = answer(model, ids, steps=12)
    with KvtrieCache(model, executor, ids, reserve=16) as cache:
        other = copy.deepcopy(cache)
        agree(truth, answer(model, ids, cache, steps=12))
        with other:
            agree(truth, answer(model, ids, other, steps=12))
    executor.manager.audit()
    executor.close()
