"""The weights and adapters that vLLM's requests compute with, in the scheduler's process."""

from types import SimpleNamespace

import pytest

from kvtrie.engines.vllm.identity import Identity

pytestmark = pytest.mark.engine


def request(name=None, ident=1, *, inplace=False, request_id="r"):
    lora = None
    if name is not None:
        lora = SimpleNamespace(lora_name=name, lora_int_id=ident, load_inplace=inplace)
    return SimpleNamespace(lora_request=lora, request_id=request_id)


def opened():
    return Identity({0: b"a", 1: b"b"}, slots=8)


def hold(identity, **held):
    """Both workers report adapters of equal tensors, by their numbers `a1`, `a2` and so on."""
    digests = {int(ident[1:]): digest for ident, digest in held.items()}
    for rank in (0, 1):
        identity.adapters.on_held(rank, identity.adapters.question, digests)


def loaded(identity, asked, **held):
    """Have the workers load the adapter that a request waits for."""
    assert identity.awaits(asked)
    assert identity.awaits(asked)  # until all have answered
    wanted = identity.adapters.take_wanted()
    hold(identity, **held)
    assert not identity.awaits(asked)
    return wanted


def test_request_waits_until_all_workers_have_named_its_adapter():
    identity, asked = opened(), request("mine")
    assert identity.awaits(asked)
    assert identity.name(asked) is None
    assert not identity.known_for(asked)
    assert identity.known_for(request())
    assert not identity.awaits(request())
    assert identity.adapters.take_wanted() == [asked.lora_request]
    assert identity.adapters.take_wanted() == []
    identity.adapters.on_held(0, 1, {1: b"x"})
    assert identity.awaits(asked)
    identity.adapters.on_held(1, 1, {1: b"y"})
    assert not identity.awaits(asked)
    assert identity.name(asked)
    assert identity.adapters.digests(1) == {0: b"x", 1: b"y"}


def test_adapters_of_one_content_share_a_name_and_of_another_do_not():
    def named(name, ident, content):
        identity, asked = opened(), request(name, ident)
        loaded(identity, asked, **{f"a{ident}": content})
        return identity.name(asked)

    assert named("mine", 1, b"x") == named("other", 7, b"x") != named("mine", 1, b"y")


def test_adapter_that_cannot_be_loaded_has_no_name_and_does_not_wait():
    identity, asked = opened(), request("mine")
    loaded(identity, asked, a1=b"")
    assert identity.name(asked) is None
    assert not identity.awaits(asked)


def test_replaced_adapter_has_another_name_and_its_old_blocks_are_stale():
    identity, asked = opened(), request("mine")
    loaded(identity, asked, a1=b"x")
    before = identity.name(asked)
    identity.request_rehash(weights=False)  # a call that failed
    assert identity.name(asked) is None
    hold(identity, a1=b"x")
    assert identity.name(asked) == before
    assert not identity.reads_stale(asked, [3])
    hold(identity, a1=b"y")
    assert identity.name(asked) not in {None, before}
    assert identity.reads_stale(asked, [3])
    assert not identity.reads_stale(request(), [3])
    identity.written([3])
    assert not identity.reads_stale(asked, [3])
    assert identity.reads_stale(asked, [3, 4])


def test_evicted_adapter_is_loaded_and_named_again():
    identity, asked = opened(), request("mine")
    loaded(identity, asked, a1=b"x")
    before = identity.name(asked)
    hold(identity)
    assert identity.name(asked) is None
    loaded(identity, asked, a1=b"x")
    assert identity.name(asked) == before
    assert not identity.reads_stale(asked, [3])
    hold(identity)
    loaded(identity, asked, a1=b"z")  # its files had changed
    assert identity.name(asked) not in {None, before}
    assert identity.reads_stale(asked, [3])


def test_adapter_under_the_name_of_another_reads_stale_blocks():
    identity = opened()
    loaded(identity, request("mine"), a1=b"x")
    identity.name(request("mine"))
    hold(identity, a7=b"y")
    assert identity.name(request("mine", 7))
    assert identity.reads_stale(request("mine", 7), [0])


def test_request_that_reloads_its_adapter_waits_for_that_once():
    identity, first = opened(), request("mine", inplace=True)
    assert loaded(identity, first, a1=b"x") == [first.lora_request]
    assert not identity.awaits(first)
    second = request("mine", inplace=True, request_id="s")
    assert loaded(identity, second, a1=b"y") == [second.lora_request]
    assert not identity.awaits(request("mine"))
    identity.adapters.ended("s")
    assert identity.awaits(second)


def test_answer_to_an_older_question_is_ignored():
    identity, asked = opened(), request("mine")
    loaded(identity, asked, a1=b"x")
    identity.request_rehash(weights=False)
    for rank in (0, 1):
        identity.adapters.on_held(rank, identity.adapters.question - 1, {1: b"x"})
    assert identity.awaits(asked)


def test_weights_are_known_once_every_rank_has_answered():
    identity = opened()
    assert identity.known
    identity.request_rehash()
    identity.on_answer(0, 0, b"a")  # the answer to an older question
    identity.on_answer(0, 1, b"a")
    assert not identity.known
    identity.on_answer(1, 1, b"c")
    assert identity.known
    changed = identity.name(request())
    assert changed
    assert identity.reads_stale(request(), [0])
    identity.request_rehash()
    identity.on_answer(0, 2, b"a")
    identity.on_answer(1, 2, b"b")
    assert identity.name(request()) == ""
    assert identity.reads_stale(request(), [0])


def test_the_same_weights_leave_everything_as_it_was():
    identity = opened()
    identity.request_rehash()
    for rank, digest in enumerate((b"a", b"b")):
        identity.on_answer(rank, 1, digest)
    assert identity.name(request()) == ""
    assert not identity.reads_stale(request(), range(8))
