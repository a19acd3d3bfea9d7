"""Requests that go on from what others' prompts left get the tokens that they would get without."""

import time

import pytest
from vllm.v1.core.block_pool import BlockPool

from fastkv.integrations.vllm.scheduler import AsyncPrefixScheduler

from ..test_serving_prefixes import traffic as traffic_of_pages
from .engine import SEQUENCES, Alone, Traffic, prompt, start
from .test_methods import CASES, arguments

BLOCK, NUM = 64, 40  # tokens of an answer: two evictions
BEGINNING = prompt(5 * BLOCK + 10)
BASE = {"budget": 48, "prefill_block": BLOCK}


def settings(policy="fastkv", **more):
    return {**BASE, "policy": policy, "prefixes": 0.5, **more}


def alone(model, policy="fastkv", **more):
    return Alone(model, {**BASE, "policy": policy, **more})


def branch(blocks, more, seed):
    """A prompt that shares so many blocks with `BEGINNING`, and then goes on in its own way."""
    return BEGINNING[: blocks * BLOCK] + prompt(more, seed)


@pytest.mark.parametrize("policy", ["fastkv", "momentkv", "h2o"])
def test_second_turns_and_prompts_that_begin_alike(model, policy):
    traffic, expected = Traffic(start(model, settings(policy))), alone(model, policy)
    first = traffic.answered("first", BEGINNING, NUM)
    turn = BEGINNING + tuple(first) + prompt(100, 1)
    asked = {
        "turn": (turn, 5), "third": (turn + prompt(30, 2), (len(turn) // BLOCK)), "again": (BEGINNING, 5),
        "branch": (branch(3, 90, 3), 3), "short": (branch(0, 20, 4), 0), "one more": (branch(5, 1, 5), 4),
    }  # fmt: skip
    for name, (tokens, blocks) in asked.items():
        assert traffic.answered(name, tokens, NUM) == expected.answer(tokens, NUM), name
        assert traffic.cached[name] == blocks * BLOCK, name
    assert traffic.cached["first"] == 0


WHATEVER = "int8", "adaptive heads", "unequal layers", "vector", "reference", "mean"


@pytest.mark.parametrize("name", WHATEVER)
def test_whatever_a_page_holds(model, name):
    chosen = {**BASE, **CASES[name]}
    traffic, expected = Traffic(start(model, {**chosen, "prefixes": 0.5})), Alone(model, arguments(chosen))
    traffic.answered("first", BEGINNING, 1)
    for blocks in (5, 1):
        tokens = branch(blocks, 100, blocks)
        assert traffic.answered(f"{blocks}", tokens, NUM) == expected.answer(tokens, NUM)
        assert traffic.cached[f"{blocks}"] == blocks * BLOCK


def test_requests_that_begin_alike_among_others(model):
    """They arrive while others are read and decode, are preempted and read again from what they left, or aborted; few
    pages are kept and few are free, so that requests take kept ones and wait for others.
    """
    lengths = [30, 200, 64, 65, 130, 250, 1, 90, 300, 7, 150, 64, 33, 222]
    asked = {f"{i}": branch(i % 6, length, i % 3) for i, length in enumerate(lengths)}
    traffic, expected = Traffic(start(model, settings(), kv_cache_memory_bytes=pages(model, 7))), alone(model)
    assert traffic.scheduler.prefixes.most == 3
    for at, (name, tokens) in enumerate(asked.items()):
        traffic.ask(name, tokens, NUM)
        traffic.turn(2)
        if at in (5, 8):
            scheduler = traffic.scheduler
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
            if at == 8:
                scheduler._preempt_request(scheduler.running.pop(0), time.monotonic())
        if at == 6:
            traffic.abort("4")
        if at == 11:
            traffic.preempt()
    answers = traffic.finish()
    for name, tokens in asked.items():
        right = expected.answer(tokens, NUM)
        assert answers.get(name, []) == right[: NUM if name != "4" else len(answers.get(name, []))], name
    assert sum(traffic.cached.values()) > 5 * BLOCK
    pool = traffic.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() >= pool.num_gpu_blocks - 3  # but page 0 and what the last step reached
    assert traffic.llm.reset_prefix_cache() and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not traffic.scheduler.prefixes.kept
    assert traffic.answered("forgotten", BEGINNING, NUM) == expected.answer(BEGINNING, NUM)
    assert not traffic.cached["forgotten"]


def pages(model, number):
    """Bytes of so many pages, with the one that is nobody's."""
    llm = start(model, settings(), kv_cache_memory_bytes=2**24)
    return 2**24 // llm.llm_engine.vllm_config.cache_config.num_gpu_blocks * number + 1024


def test_a_prefix_is_only_found_with_its_salt(model):
    traffic, expected = Traffic(start(model, settings())), alone(model).answer(BEGINNING, NUM)
    for name, salt, cached in [
        ("mine", "a", 0), ("yours", "b", 0), ("nobody's", None, 0),
        ("mine again", "a", 5), ("yours again", "b", 5), ("nobody's again", None, 5), ("another's", "c", 0),
    ]:  # fmt: skip
        assert traffic.answered(name, BEGINNING, NUM, salt=salt) == expected
        assert traffic.cached[name] == cached * BLOCK, name


def test_vllm_counts_what_is_found(model):
    llm = start(model, settings(), disable_log_stats=False)
    traffic = Traffic(llm)
    for name in ("0", "1"):
        traffic.answered(name, BEGINNING, NUM)
    found = {metric.name: metric.value for metric in llm.get_metrics() if metric.name.startswith("vllm:prefix_cache_")}
    assert found == {"vllm:prefix_cache_queries": 2 * len(BEGINNING), "vllm:prefix_cache_hits": 5 * BLOCK}


def test_the_scheduler_of_steps_that_are_made_ahead(model):
    """On a CPU vLLM makes none ahead, but its scheduler can be had."""
    traffic, expected = Traffic(start(model, settings(), scheduler_cls=AsyncPrefixScheduler)), alone(model)
    assert isinstance(traffic.scheduler, AsyncPrefixScheduler)
    for i in range(6):
        traffic.ask(f"{i}", branch(5 - i % 3, 40 + i, i), NUM)
        traffic.turn(3)
    answers = traffic.finish()
    assert answers == {f"{i}": expected.answer(branch(5 - i % 3, 40 + i, i), NUM) for i in range(6)}
    assert sum(traffic.cached.values()) > 10 * BLOCK


def test_two_processes_that_share_the_heads(model):
    """Each copies its own pages."""
    traffic, expected = Traffic(start(model, settings(), tensor_parallel_size=2)), alone(model)
    for name, blocks in (("0", 5), ("1", 5), ("2", 2)):
        tokens = branch(blocks, 60, 7)
        assert traffic.answered(name, tokens, NUM) == expected.answer(tokens, NUM)
    assert traffic.cached == {"0": 0, "1": 5 * BLOCK, "2": 2 * BLOCK}


@pytest.mark.parametrize("seed", range(4))
def test_pages_of_vllm_hold_what_their_keys_say(seed):
    """As `test_serving_prefixes` says of a stand-in, of vLLM's own pool."""
    pool = BlockPool(num_gpu_blocks=40, enable_caching=False, hash_block_size=16)
    assert traffic_of_pages(pool, 40, 12, seed)


def test_a_request_does_not_wait_for_pages_that_it_holds(model, monkeypatch):
    """Where it cannot begin with what it found, because that leaves too little memory, it begins without."""
    traffic, expected = Traffic(start(model, settings())), alone(model).answer(BEGINNING, NUM)
    traffic.answered("0", BEGINNING, NUM)
    prefixes, manager = traffic.scheduler.prefixes, traffic.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    monkeypatch.setattr(manager, "allocate_slots", lambda *a, **k: None if prefixes.found else allocate(*a, **k))
    traffic.ask("1", BEGINNING, NUM)
    traffic.turn(NUM + 10)
    assert traffic.answers["1"] == expected and traffic.cached["1"] == 0


def test_an_answer_is_no_prompt(model):
    """A request of one token that is preempted answers again, though somebody has asked what it answered."""
    traffic, expected = Traffic(start(model, settings())), alone(model).answer((1,), 3 * BLOCK)
    asked = (1, *traffic.answered("0", (1,), 3 * BLOCK))
    traffic.answered("1", asked, 1)
    traffic.ask("2", (1,), 3 * BLOCK)
    traffic.turn(2 * BLOCK + 10)
    scheduler, (request,) = traffic.scheduler, traffic.scheduler.running
    scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    traffic.turn()
    assert request.num_computed_tokens == 1
    assert traffic.finish()["2"] == traffic.answers["0"] == expected


def test_who_waits_for_tokens_begins_where_somebody_else_did(model):
    """A step has room for one block: the second request is found a beginning and given nothing."""
    traffic = Traffic(start(model, settings(), max_num_batched_tokens=BLOCK + SEQUENCES))
    longer = BEGINNING + prompt(100, 1)
    expected = traffic.answered("first", longer, NUM)
    traffic.ask("other", prompt(300, 9), NUM)
    traffic.ask("again", longer, NUM)
    assert traffic.finish()["again"] == expected and traffic.cached["again"] == 6 * BLOCK
