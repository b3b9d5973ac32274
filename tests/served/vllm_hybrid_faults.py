"""Faults of models with several groups: damaged files, loads that fail or whose request is gone."""

from __future__ import annotations

import pytest
import servers
from servers import STATES, hybrid, prompt, same, serve

from kvtrie.tiers import EnginePool

pytestmark = pytest.mark.since("0.32")

PAGE = 4096  # bytes; layers in files begin at whole pages


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return servers.tiny_gemma(tmp_path_factory.mktemp("gemma")), {}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return servers.tiny_qwen(tmp_path_factory.mktemp("qwen")), STATES


def damage(folder):
    """Flip a bit in each page of the layers of a store; its headers stay as they are."""
    flipped = 0
    for path in folder.glob("segment-*"):
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), PAGE):
            page = data[at : at + PAGE]
            if any(page) and not page.startswith(b"kvtrieP1"):
                data[at + 5] ^= 1
                flipped += 1
        path.write_bytes(data)
    return flipped


@pytest.mark.parametrize(("kind", "group"), [("gemma", 0), ("gemma", 1), ("qwen", 0), ("qwen", 1)])
def test_damage_of_one_group_is_a_miss(kind, group, tmp_path, request):
    model, more = request.getfixturevalue(kind)
    prompts = [prompt(seed, 1000 if more else 250) for seed in range(3)]
    with serve(model, **more) as server:
        wanted = [server.answers([each], tokens=20)[0] for each in prompts]
    with serve(model, hybrid(tmp_path), **more) as server:
        size = server.core.scheduler.block_size
        for each in prompts:
            server.answers([each])
            server.wait_for_stores()
        folder = server.worker.disk.groups[group].store.folder
    assert damage(folder) > 3
    whole = (len(prompts[0]) - 1) // size * size
    with serve(model, hybrid(tmp_path), **more) as server:
        for found in (0, whole):
            for each, right in zip(prompts, wanted, strict=True):
                got = server.answers([each], tokens=20)
                assert server.found == found
                if not (found and more):  # in bfloat16 a hit may differ from a cold run
                    same(got, [right])
                server.wait_for_stores()
            server.forget()
        server.check()


class BrokenError(Exception):
    """A copy that did not go."""


@pytest.mark.parametrize("kind", ["gemma", "qwen"])
def test_failing_loads_are_computed_again(kind, request, monkeypatch):
    model, more = request.getfixturevalue(kind)
    prompts = [prompt(seed, 1000 if more else 250) for seed in range(4)]
    with serve(model, hybrid(), policy="recompute", **more) as server:
        wanted = [server.answers([each], tokens=20)[0] for each in prompts]
        server.wait_for_stores()
        for left in ([1], [0, 1], [0, 0, 1, 0, 1], [1] * 4):
            server.forget()
            copy = EnginePool.copy_from

            def fail(self, *args, left=left, copy=copy):
                if left and left.pop():
                    raise BrokenError
                copy(self, *args)

            monkeypatch.setattr(EnginePool, "copy_from", fail)
            for each, right in zip(prompts, wanted, strict=True):
                same(server.answers([each], tokens=20), [right])
            assert not left
            monkeypatch.undo()
        assert server.kv_scheduler.cache.counters.lost["a load that failed"] > 0
        server.forget()
        for each, right in zip(prompts, wanted, strict=True):
            same(server.answers([each], tokens=20), [right])
            assert server.found > 0
        server.check()


def test_a_failing_disk_fails_no_request(gemma, tmp_path, monkeypatch):
    model, _ = gemma
    prompts = [prompt(seed, 250) for seed in range(4)]
    with serve(model, hybrid(tmp_path, "600KB")) as server:
        wanted = []
        for each in prompts:
            wanted += server.answers([each])
            server.wait_for_stores()
        asked = []

        def fail(rows):
            asked.append(len(rows))
            return ["no disk"] * len(rows)

        for group in server.worker.disk.groups:
            monkeypatch.setattr(group, "read_many", fail)
        server.forget()
        for each, right in zip(prompts, wanted, strict=True):
            same(server.answers([each]), [right])
        assert asked
        server.check()


@pytest.mark.parametrize("host", ["64MB", "600KB"])
def test_requests_whose_loads_are_under_way_are_aborted(gemma, tmp_path, host):
    model, _ = gemma
    prompts = [prompt(seed, 250) for seed in range(4)]
    sampling = servers.SamplingParams(max_tokens=20, temperature=0, logprobs=1, detokenize=False)
    waited = set()
    with serve(model, hybrid(tmp_path, host)) as server:
        engine, requests = server.llm.llm_engine, server.core.scheduler.requests
        wanted = []
        for each in prompts:
            wanted += server.answers([each], tokens=20)
            server.wait_for_stores()
        for steps in range(8):
            server.forget()
            for at, each in enumerate(prompts[:2]):
                engine.add_request(f"{steps} {at}", {"prompt_token_ids": each}, sampling)
            for _ in range(steps):
                engine.step()
            waited |= {each.status.name for each in requests.values()}
            engine.abort_request([f"{steps} 0"])
            # Blocks that the aborted loads were to fill go to another request at once.
            engine.add_request(f"{steps} 2", {"prompt_token_ids": prompts[2]}, sampling)
            outputs = {}
            while engine.has_unfinished_requests():
                outputs |= {each.request_id: each for each in engine.step() if each.finished}
            for at in (1, 2):
                same([servers.answer(outputs[f"{steps} {at}"])], [wanted[at]])
            server.wait_for_stores()
        if host == "64MB":
            assert "WAITING_FOR_REMOTE_KVS" in waited
        else:  # blocks of the disk come whenever they are read
            assert server.kv_scheduler.cache.counters.tokens["disk"] > 0
        server.check()
