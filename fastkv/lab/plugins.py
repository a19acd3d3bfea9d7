"""What lm-evaluation-harness loads from fastkv: the model "fastkv" and the tasks of RULER.

The model is a transformers model with a compressed cache. It generates as the harness's own model does, in left-padded
batches. Log-likelihoods need a choice, because the harness reads context and continuation in one forward, in which
every token attends before anything is evicted, so that compression would never be seen:

    stream   the whole text is read in blocks of `prefill_block` tokens, and every block attends to what is left of the
             blocks before it. The model is scored while it reads; also right for rolling perplexity.
    prefix   the context but its last token is read and compressed, then its last token and the continuation are scored
             on what is left. A continuation of one token, a letter of a multiple choice, is affected too.

Neither changes a score while everything fits into the budget. With several GPUs, `accelerate launch` starts one process
for each, every process evaluates its share of the requests, and the harness gathers the answers; a model that needs
several GPUs is spread over them by `parallelize=True`.

The tasks, fastkv_ruler_niah_single_1 and so on, are in `tasks/*.yaml`. They are not the harness's own "ruler", which
need downloads. The group fastkv_ruler has all of them:

    fastkv eval --model PATH --tasks fastkv_ruler --metadata max_seq_lengths=[4096,8192] num_samples=20

What can be chosen is metadata, as for the harness's own tasks:

    max_seq_lengths    tokens of prompt and answer, a number or a list (4096)
    num_samples        texts of every length (100; the paper has 500)
    seed               of the texts (0)
    tokenizer          folder or name; by default that of the model
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from lm_eval.api.metrics import mean
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from torch.nn import Module
from tqdm import tqdm
from transformers import AutoTokenizer

from ..api import patch, unpatch
from ..budget import Budget
from ..config import BUDGET, POLICY
from ..errors import FastKVError
from ..integrations.transformers.stock import CACHE
from ..policies import Policy
from . import reading, ruler
from .common import FULL, to_budget
from .pretrained import loading, place
from .reading import cache_bytes
from .ruler import Sample, Tokenizer

MODES = ("auto", "stream", "prefix")
SETTINGS = ("prefill_block", "evict_every", "correction", "slots", "mode", "question", "vector")  # of `set_cache`
PREFIX = "fastkv_ruler_"
LENGTHS, SAMPLES = 4096, 100

Request = tuple[Any, list[int], list[int]]  # what the harness calls it, tokens of the context and of the continuation
Answer = tuple[float, bool]  # log-likelihood of the continuation, and whether greedy decoding would give it


@register_model("fastkv")
class FastKVLM(HFLM):
    """The harness's transformers model with a compressed cache.

    As `--model_args` on a command line: pretrained=PATH,policy=momentkv,budget=keep=0.25,mode=prefix.

    Args:
        pretrained: folder, name, or a transformers model, as in the harness.
        policy, prefill_block, evict_every, correction, slots, vector: as in `fastkv.patch`; policy "full" is the
            stock cache.
        budget: tokens per KV head, "keep=0.25", "bytes=2000000", "quality=0.95", or a `Budget`.
        mode: how log-likelihoods are measured, see above; "auto" is stream with a prefill_block and prefix without.
        question: "seen" for prompts that are read as a whole, "later" for texts that are read, and compressed,
            before it is known; the tasks of fastkv say where it begins.
        sinks, recent, layers, heads: as in `Budget`.
        kwargs: everything else that the harness's own model takes.

    A budget that follows the prompt (keep, quality) must not see the padding of a batch: its batches have one sequence.
    With a `prefill_block`, padding shifts where blocks of generation prompts begin; batches of one sequence avoid it.
    `cache_bytes` is the largest cache that any sequence needed since `set_cache`.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str | Policy = POLICY,
        budget: int | str | Budget = BUDGET,
        sinks: int = 4,
        recent: int = 32,
        layers: str | Sequence[float] = "uniform",
        heads: str = "uniform",
        **kwargs: Any,
    ) -> None:
        settings = {name: kwargs.pop(name) for name in SETTINGS if name in kwargs}
        super().__init__(pretrained, **kwargs)
        if hasattr(self, "accelerator"):
            # The harness numbers processes within a node, and only where a node has several GPUs.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        adapted: Any = self.model
        self.patched: Any = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
        self.patched.register_forward_hook(self._measure)
        self.set_cache(policy, to_budget(budget, sinks=sinks, recent=recent, layers=layers, heads=heads), **settings)

    def set_cache(
        self,
        policy: str | Policy,
        budget: int | Budget = BUDGET,
        *,
        prefill_block: int | None = None,
        mode: str = "auto",
        question: str = "seen",
        **settings: Any,
    ) -> None:
        """Give the model another cache, arguments as in the constructor; what is refused leaves the cache as it was."""
        if mode not in MODES:
            raise FastKVError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if question not in reading.QUESTION:
            raise FastKVError(f"question must be one of {', '.join(reading.QUESTION)}, got {question!r}")
        if policy != FULL and mode == "stream" and prefill_block is None:
            raise FastKVError(
                "mode stream needs prefill_block, got none, with which every token attends before anything is evicted; "
                "give a prefill_block or use mode=prefix"
            )
        if policy == FULL:
            unpatch(self.patched)
        else:
            patch(self.patched, policy, budget, prefill_block=prefill_block, **settings)
        self.compressed = policy != FULL
        self.alone = self.compressed and Budget.of(budget).follows_prompt
        self.mode = mode if mode != "auto" else "prefix" if prefill_block is None else "stream"
        self.question = question
        self.cache_bytes = 0

    alone = False  # whether every batch has one sequence

    @property
    def batch_size(self) -> Any:
        """Sequences in a batch, or "auto"."""
        return 1 if self.alone else self.batch_size_per_gpu

    def _measure(self, module: Module, args: Any, output: Any) -> None:
        """Forward hook: note the bytes of the cache, per sequence."""
        cache = getattr(output, CACHE, None)
        if cache is not None:
            self.cache_bytes = max(self.cache_bytes, cache_bytes(cache) // len(output.logits))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of prompts. Raises FastKVError for a question that comes later and is not known to begin."""
        if self.question == "seen":
            return super().generate_until(requests, disable_tqdm)
        silent = disable_tqdm or self.rank != 0
        return [self._answer(one) for one in tqdm(requests, disable=silent, desc="Running generate_until requests")]

    def _answer(self, request: Any) -> str:
        """What is written after a question that comes once its text was read."""
        (prompt, how), asked = request.args, (request.doc or {}).get("question")
        if not isinstance(asked, str) or not asked or not prompt.endswith(asked):
            raise FastKVError(
                f"question 'later' needs tasks whose prompts end with the question that they name, as those of "
                f"{PREFIX}... do, got {request.task_name}; choose question 'seen'"
            )
        tokens = how.get("max_gen_toks", self.max_gen_toks)
        said = self.tok_decode(reading.answered(self.model, self.tokenizer, prompt, asked, tokens))
        for stop in filter(None, how.get("until") or []):
            said = said.partition(stop)[0]
        return str(said)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts. Raises FastKVError in mode prefix, which would find no context to compress."""
        if self.compressed and self.mode == "prefix":
            raise FastKVError(
                "rolling log-likelihoods have no context, only a text, and mode prefix compresses contexts; use "
                "mode=stream with a prefill_block"
            )
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Score requests in the chosen mode; the harness calls this for every kind of likelihood."""
        if self.question == "later":
            raise FastKVError(
                "question 'later' needs tasks whose answers are generated, got one with log-likelihoods, whose "
                "contexts do not say where a question begins; choose question 'seen'"
            )
        if self.compressed and self.mode == "prefix":
            return self._score_after_contexts(requests, disable_tqdm)
        return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)

    def _score_after_contexts(self, requests: list[Request], disable_tqdm: bool) -> list[Answer]:
        """Mode prefix: requests with the same context, up to a batch of them, share one reading of it."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            # As in the harness: what is too long loses its beginning.
            tokens = (context + continuation)[-(self.max_length + 1) :]
            by_context.setdefault(tuple(tokens[: -len(continuation)]), []).append(index)
        size = self.max_batch_size if self.batch_size == "auto" else self.batch_size
        batches = [
            (key, found[at : at + size]) for key, found in by_context.items() for at in range(0, len(found), size)
        ]
        answers: dict[int, Answer] = {}
        silent = disable_tqdm or self.rank != 0
        for context_tokens, batch in tqdm(batches, disable=silent, desc="Running loglikelihood requests"):
            scores = self._score(context_tokens, [requests[index][2] for index in batch])
            for index, answer in zip(batch, scores):
                answers[index] = answer
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return [answers[index] for index in range(len(requests))]

    @torch.no_grad()
    def _score(self, context: tuple[int, ...], continuations: list[list[int]]) -> list[Answer]:
        """Read and compress all of the context but its last token, then score continuations in one batch."""
        with torch.autocast(
            self.device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        ):
            past = None
            if len(context) > 1:
                read = torch.tensor([context[:-1]], device=self.device)
                past = self.model(read, use_cache=True, logits_to_keep=1)[CACHE]
                past.batch_repeat_interleave(len(continuations))
            texts = [[context[-1], *one[:-1]] for one in continuations]
            scores = reading.forced(self.model, past, texts, self.softmax_dtype)
        answers = []
        for score, continuation in zip(scores, continuations):
            target = torch.tensor(continuation, device=score.device)
            chosen = score.gather(1, target[:, None])
            answers.append((float(chosen.sum()), bool((score.argmax(-1) == target).all())))
        return answers


class RulerTask(ConfigurableTask):
    """One of the eleven; the prompt is the text, greedy decoding answers, RULER's own metric marks.

    Metrics: "score", the mean over all texts; with several lengths also "score_4096" and so on.

    Args: config: of the harness: the name of the task, and the metadata above.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        metadata = config.get("metadata") or {}
        self.kind = config["task"].removeprefix(PREFIX)
        self.lengths = whole_numbers("max_seq_lengths", metadata.get("max_seq_lengths", LENGTHS))
        super().__init__(
            config={
                **{name: value for name, value in config.items() if name != "class"},
                "output_type": "generate_until",
                "test_split": "test",
                "doc_to_text": "prompt",
                "doc_to_target": "answers",
                "num_fewshot": 0,
                "metric_list": [
                    {"metric": name, "aggregation": mean, "higher_is_better": True}
                    for name in ("score", *(f"score_{length}" for length in self.lengths if len(self.lengths) > 1))
                ],
                "process_results": self.marks,
                "generation_kwargs": {"until": [], "do_sample": False, "temperature": 0.0},
            }
        )

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the texts, which the harness would download, and leave as much room for an answer as they do."""
        from datasets import Dataset

        metadata = self.config.metadata or {}
        (samples,) = whole_numbers("num_samples", metadata.get("num_samples", SAMPLES), most=1)
        (seed,) = whole_numbers("seed", metadata.get("seed", 0), most=1, least=0)
        tokenizer = tokenizer_of(metadata.get("tokenizer") or metadata.get("pretrained"))
        rows = []
        for length in self.lengths:
            texts = written(self.kind, tokenizer, length, samples, seed)
            kept = ("prompt", "question", "answers")
            rows += [{"length": length, **{name: getattr(one, name) for name in kept}} for one in texts]
        self.dataset = {"test": Dataset.from_list(rows)}
        self.config.generation_kwargs["max_gen_toks"] = texts[0].tokens_to_generate

    def marks(self, doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        """The score of one answer, under the names of the metrics it counts for."""
        mark = ruler.string_match_all(results[0], tuple(doc["answers"]))
        return {"score": mark, **({f"score_{doc['length']}": mark} if len(self.lengths) > 1 else {})}


@lru_cache(maxsize=32)  # the harness loads a task anew for each cache it evaluates
def written(kind: str, tokenizer: Tokenizer, length: int, samples: int, seed: int) -> list[Sample]:
    """The texts of one length."""
    indices = tqdm(range(samples), desc=f"writing {kind}, {length} tokens", leave=False)
    return [ruler.generate(kind, tokenizer, length, seed, index) for index in indices]


@lru_cache(maxsize=4)
def tokenizer_of(given: str | Tokenizer | None) -> Tokenizer:
    """The tokenizer that lengths are counted with, from its folder or name."""
    if given is None:
        raise FastKVError(
            "RULER needs a tokenizer to write texts of a length, got none; pass --metadata tokenizer=PATH or "
            "--model_args pretrained=PATH"
        )
    if not isinstance(given, str):
        return given
    with loading(f"a tokenizer from {given}", "name another with --metadata tokenizer=PATH"):
        path, gguf = place(given)
        return AutoTokenizer.from_pretrained(path, **gguf)


def whole_numbers(name: str, value: Any, most: int | None = None, least: int = 1) -> tuple[int, ...]:
    """One or several numbers of the metadata, each once. Raises FastKVError for anything else."""
    numbers = tuple(dict.fromkeys(value)) if isinstance(value, (list, tuple)) else (value,)
    whole = all(isinstance(one, int) and not isinstance(one, bool) and one >= least for one in numbers)
    if not whole or not numbers or len(numbers) > (most or len(numbers)):
        raise FastKVError(
            f"metadata {name} must be {'a whole number' if most == 1 else 'whole numbers'} of at least {least}, got "
            f"{value!r}; for example {name}={1024 if least else 0}"
        )
    return numbers
