"""Requests that go on from what others' prompts left get the tokens that they would get without."""

import pytest
from vllm import SamplingParams

from .engine import Alone, Traffic, prompt, start

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


class Counted(Traffic):
    """Attributes: cached: tokens of every request that vLLM says it did not compute."""

    def __init__(self, llm):
        super().__init__(llm)
        self.cached = {}

    def turn(self, times=1):
        for _ in range(times):
            for output in self.engine.step():
                self.answers[output.request_id] = list(output.outputs[0].token_ids)
                self.cached[output.request_id] = output.num_cached_tokens

    def ask(self, name, tokens, num, salt=None, **params):
        chosen = SamplingParams(temperature=0, max_tokens=num, detokenize=False, ignore_eos=True, **params)
        asked = {"prompt_token_ids": list(tokens)} | ({} if salt is None else {"cache_salt": salt})
        self.engine.add_request(name, asked, chosen)

    @property
    def scheduler(self):
        return self.engine.engine_core.engine_core.scheduler

    def answered(self, name, tokens, num=NUM, **params):
        """The answer to one request, asked alone."""
        self.ask(name, tokens, num, **params)
        return self.finish()[name]


@pytest.mark.parametrize("policy", ["fastkv", "momentkv", "h2o"])
def test_second_turns_and_prompts_that_begin_alike(model, policy):
    traffic, expected = Counted(start(model, settings(policy))), alone(model, policy)
    first = traffic.answered("first", BEGINNING)
    turn = BEGINNING + tuple(first) + prompt(100, 1)
    asked = {
        "turn": (turn, 5),
        "third": (turn + prompt(30, 2), (len(turn) // BLOCK)),
        "again": (BEGINNING, 5),
        "branch": (branch(3, 90, 3), 3),
        "short": (branch(0, 20, 4), 0),
    }
    for name, (tokens, blocks) in asked.items():
        assert traffic.answered(name, tokens) == expected.answer(tokens, NUM), name
        assert traffic.cached[name] == blocks * BLOCK, name
    assert traffic.cached["first"] == 0
