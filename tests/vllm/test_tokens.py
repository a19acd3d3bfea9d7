"""A request gets the tokens that `fastkv.patch` gives it alone, whatever else is being served."""

import pytest

from fastkv.integrations.vllm.scheduler import tokens_now

from .engine import SEQUENCES, Alone, Traffic, prompt, start

POLICIES = ["momentkv", "keydiff", "fastkv", "snapkv", "h2o"]
BLOCK = 64
NUM = 40  # tokens of an answer: two evictions


def settings(policy, block):
    return {"policy": policy, "budget": 48, "prefill_block": block}


@pytest.mark.parametrize("block", [None, BLOCK], ids=["whole", "blocks"])
@pytest.mark.parametrize("policy", POLICIES)
def test_requests_among_others(model, policy, block):
    """Sixteen requests of mixed lengths arrive while others decode; one is longer than any other, and in the middle;
    one is aborted; twice all that run are preempted and computed again.
    """
    chosen = settings(policy, block)
    lengths = [30, 64, 65, 129, 200, 31, 128, 1, 900, 90, 63, 257, 48, 49, 300, 7]
    asked = {f"{i}": (prompt(length, i), NUM + i % 3) for i, length in enumerate(lengths)}
    traffic = Traffic(start(model, chosen))
    for i, (name, request) in enumerate(asked.items()):
        traffic.ask(name, *request)
        traffic.turn(2)
        if i in (5, 11):
            traffic.preempt()
        if i == 9:
            traffic.abort("6")
    answers, alone = traffic.finish(), Alone(model, chosen)
    for name, request in asked.items():
        expected = alone.answer(*request)
        if name == "6":
            assert answers[name] == expected[: len(answers[name])] and len(answers[name]) < NUM
        else:
            assert answers[name] == expected, f"request {name} of {len(request[0])} tokens"


@pytest.mark.parametrize(
    "prompt_length, computed, offered, block, expected",
    [(200, 0, 200, None, 200), (200, 0, 199, None, 0), (200, 0, 200, 64, 64), (200, 64, 63, 64, 0),
     (200, 192, 100, 64, 8), (200, 192, 7, 64, 0), (50, 0, 64, 64, 50), (200, 200, 1, 64, 1), (200, 210, 30, None, 1),
     (200, 128, 0, 64, 0)],
)  # fmt: skip
def test_steps_end_where_blocks_end(prompt_length, computed, offered, block, expected):
    assert tokens_now(prompt_length, computed, offered, block) == expected


def test_requests_begin_in_order(model):
    """A step with room for a block and 16 tokens: the second request waits for a block, and the third behind it."""
    traffic = Traffic(start(model, settings("keydiff", BLOCK), max_num_batched_tokens=BLOCK + SEQUENCES))
    for name, length in (("0", 200), ("1", 200), ("2", 10)):
        traffic.ask(name, prompt(length), NUM)
    traffic.turn(2)
    assert [request.num_prompt_tokens for request in traffic.scheduler.running] == [200]
    traffic.turn(2)
    assert [request.num_prompt_tokens for request in traffic.scheduler.running] == [200, 200]
    assert {len(answer) for answer in traffic.finish().values()} == {NUM}
