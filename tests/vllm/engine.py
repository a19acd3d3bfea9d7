"""Both sides of a comparison: vLLM with a compressed cache, and `fastkv.patch` on one sequence at a time."""

import functools

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

import fastkv
from fastkv import Budget

from ..toy import MODEL_DIR

FITTED = MODEL_DIR  # the toy, and what was fitted to it
VOCABULARY, LONGEST, SEQUENCES = 720, 1024, 16
ON_GPU = {  # where there is one: steps that decode are captured, nothing else is compiled
    "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}},
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 16]},
    "enforce_eager": False, "gpu_memory_utilization": 0.03,
}  # fmt: skip


def prompt(length, seed=0):
    """Tokens of a prompt; each seed has its own."""
    draw = torch.Generator().manual_seed(1000 * seed + length)
    return (1, *torch.randint(3, VOCABULARY, (length - 1,), generator=draw).tolist())


def start(model, settings, dtype="float32", **arguments):
    """vLLM with these settings for fastkv; None for none."""
    given = {
        "max_model_len": LONGEST, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": LONGEST + SEQUENCES,
        "kv_cache_memory_bytes": 2**27, "skip_tokenizer_init": True, "enforce_eager": True,
        **(ON_GPU if torch.cuda.is_available() and settings is not None else {}), **arguments,
    }  # fmt: skip
    extra = {} if settings is None else {"fastkv": settings}
    return LLM(model, dtype=dtype, additional_config=extra, **given)


@functools.cache
def loaded(model, dtype="float32"):
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to("cuda" if torch.cuda.is_available() else "cpu")


def budget_of(budget, context=LONGEST, **more):
    """The budget that is told to vLLM as `fastkv.patch` takes it, with heads for the longest text vLLM reads."""
    given = budget if isinstance(budget, dict) else {"tokens": budget}
    return Budget(**{"context": context, **more, **given})


class Alone:
    """What `fastkv.patch` answers with these settings, each prompt by itself."""

    def __init__(self, model, settings, dtype="float32", **budget):
        chosen = settings | {"budget": budget_of(settings["budget"], **budget)}
        self.model = fastkv.patch(loaded(model, dtype), **chosen)

    def answer(self, tokens, num):
        out = self.model.generate(
            torch.tensor([tokens], device=self.model.device),
            max_new_tokens=num,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(tokens) :].tolist()


class Traffic:
    """Requests that come and go while others are served. A turn is a step of the engine.

    Attributes:
        answers: tokens so far of every request, by its name.
        cached: tokens of every request that vLLM says it did not compute.
    """

    def __init__(self, llm):
        self.llm, self.engine, self.answers, self.cached = llm, llm.llm_engine, {}, {}

    def ask(self, name, tokens, num, own=None, salt=None, **params):
        """Args: own: what the request asks of its cache."""
        chosen = SamplingParams(
            temperature=0, max_tokens=num, detokenize=False, ignore_eos=True, extra_args=own or {}, **params
        )
        asked = {"prompt_token_ids": list(tokens)} | ({} if salt is None else {"cache_salt": salt})
        self.engine.add_request(name, asked, chosen)

    def turn(self, times=1):
        for _ in range(times):
            for output in self.engine.step():
                self.answers[output.request_id] = list(output.outputs[0].token_ids)
                self.cached[output.request_id] = output.num_cached_tokens

    def finish(self):
        while self.engine.has_unfinished_requests():
            self.turn()
        return self.answers

    def answered(self, name, tokens, num, **asked):
        """The answer to one request, asked alone."""
        self.ask(name, tokens, num, **asked)
        return self.finish()[name]

    def preempt(self):
        """All running requests lose their pages and are computed again."""
        assert self.llm.reset_prefix_cache(reset_running_requests=True)

    def abort(self, name):
        self.engine.abort_request([name])

    @property
    def scheduler(self):
        return self.engine.engine_core.engine_core.scheduler
