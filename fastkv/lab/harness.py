"""`fastkv eval`: lm-evaluation-harness tasks with the full cache and with every policy at every budget.

Each finished cache is a JSON file in `--out`, so that the same command, given again, goes on where it was interrupted.
Several GPUs, the two ways to measure log-likelihoods (`stream` and `prefix`) and the tasks of RULER in `tasks/*.yaml`:
docs/evaluation.md.

The model is a transformers model with a compressed cache. It generates as the harness's own does, in left-padded
batches. In its log-likelihoods the harness reads context and continuation in one forward, in which every token attends
before anything is evicted, so that compression would never be seen: hence the two ways.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import lm_eval
import torch
from jinja2 import TemplateError
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string
from rich.table import Table
from torch.nn import Module
from tqdm import tqdm
from transformers import AutoTokenizer
from yaml import YAMLError  # type: ignore[import-untyped]

from ..api import patch, unpatch
from ..budget import Budget
from ..config import BUDGET
from ..errors import FastKVError
from ..integrations.transformers.stock import CACHE
from ..policies import Policy
from . import common, pretrained, reading, ruler
from .common import FULL
from .ruler import Sample, Tokenizer

TASK_FILES = Path(__file__).parent / "tasks"  # what the harness takes as --include_path: fastkv's own tasks
OWN = "fastkv_"  # how the names of fastkv's tasks begin
KEPT = "results groups group_subtasks configs versions n-shot n-samples higher_is_better config git_hash".split()
UNUSABLE = (ImportError, OSError, ValueError, TypeError, AttributeError, YAMLError, TemplateError)
ADVICE = "where its dataset cannot be reached, copy it to this machine and name it in a YAML file of your own"
PREFIX = "fastkv_ruler_"

Request = tuple[Any, list[int], list[int]]  # what the harness calls it, tokens of the context and of the continuation
Answer = tuple[float, bool]  # log-likelihood of the continuation, and whether greedy decoding would give it


class FastKVLM(HFLM):
    """The harness's transformers model, with the stock cache until `set_cache` gives it another.

    Args: of the harness's own model.

    A budget that follows the prompt (keep, quality) must not see the padding of a batch: its batches have one sequence.
    With a `prefill_block`, padding shifts where blocks of generation prompts begin; batches of one sequence avoid it.
    `cache_bytes` is the largest cache that any sequence needed since `set_cache`.
    """

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        super().__init__(pretrained, **kwargs)
        if hasattr(self, "accelerator"):
            # The harness numbers processes within a node, and only where a node has several GPUs.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        adapted: Any = self.model
        self.patched: Any = adapted.get_base_model() if hasattr(adapted, "get_base_model") else adapted
        self.patched.config.get_text_config(decoder=True).use_cache = True  # which some checkpoints turn off
        self.patched.register_forward_hook(self._measure)
        self.set_cache(FULL)

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
        """Give the model another cache; what is refused leaves the cache as it was.

        Args: policy, budget, prefill_block, settings: as in `fastkv.patch`; policy "full" is the stock cache.
            mode: how log-likelihoods are measured, see above; "auto" is stream with a prefill_block and prefix without.
            question: "seen" for prompts that are read as a whole, "later" for texts that are read, and compressed,
            before it is known; the tasks of fastkv say where it begins.
        """
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
            self.cache_bytes = max(self.cache_bytes, reading.cache_bytes(cache) // len(output.logits))

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
        until = how.get("until") or []
        for stop in filter(None, [until] if isinstance(until, str) else until):
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
        self.lengths = whole_numbers("max_seq_lengths", metadata.get("max_seq_lengths", 4096))
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
        (samples,) = whole_numbers("num_samples", metadata.get("num_samples", 100), most=1)
        (seed,) = whole_numbers("seed", metadata.get("seed", 0), most=1, least=0)
        tokenizer = tokenizer_of(metadata.get("tokenizer"))
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
            "RULER needs a tokenizer to write texts of a length, got none; pass --metadata tokenizer=PATH"
        )
    if not isinstance(given, str):
        return given
    with pretrained.loading(f"a tokenizer from {given}", "name another with --metadata tokenizer=PATH"):
        path, gguf = pretrained.place(given)
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


# The command.


def scores_of(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The metrics in what the harness returned, by task, the first one first: their names ("metric,filter"), values,
    standard errors or None, and whether more is better. A group that has a score of its own stands for its tasks.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for task, numbers in results["results"].items():
        better = results["higher_is_better"].get(task, {})
        for key, value in numbers.items():
            metric, comma, rest = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = numbers.get(f"{metric}_stderr,{rest}")
            known = isinstance(stderr, (int, float)) and math.isfinite(stderr)  # the harness also writes N/A and NaN
            score = {"metric": key, "value": value, "stderr": stderr if known else None}
            found.setdefault(task, []).append({**score, "higher_is_better": better.get(metric) is not False})
    groups: dict[str, list[str]] = results.get("group_subtasks", {})
    parts = {task for group, tasks in groups.items() if group in found for task in tasks}
    return {task: scores for task, scores in found.items() if task not in parts}


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Evaluate every cache that has no file yet, print the table, and write results.json.

    Returns: of each cache its policy and budget as on the command line, nbytes, the largest of one sequence, seconds of
        the whole evaluation, and scores, see `scores_of`.
    """
    if options.batch_size != "auto" and not (options.batch_size.isdecimal() and int(options.batch_size)):
        raise FastKVError(f"--batch-size must be auto or a number of at least 1, got {options.batch_size}")
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise FastKVError(f"--include-path must be a folder with task YAML files, got {options.include_path}")
    names = "model tasks mode question limit num_fewshot metadata batch_size seed model_args include_path"
    common.caches_of(options)
    where, gguf = pretrained.place(options.model)
    metadata = {"pretrained": where, "seed": options.seed, "tokenizer": options.model, **metadata_of(options.metadata)}
    manager = load_tasks(options.tasks, options.include_path, metadata)
    lm = load_model(where, gguf, options)
    console = common.console_of(quiet=lm.rank != 0)
    lengths = metadata.get("max_seq_lengths", 0)
    longest = max(lengths) if isinstance(lengths, (list, tuple)) else lengths
    common.check_length("max_seq_lengths", longest, lm.patched, options.model)  # longer ones would be cut
    caches, how = common.caches_of(options, lm.patched), {"mode": options.mode, "question": options.question}
    results = common.Results(options, names, caches, lm.patched)
    for cache in caches:  # what cannot be used is refused before anything slow
        lm.set_cache(**cache.arguments, **how)
        common.check_first(lm.patched)
    rows = []
    for place, cache in enumerate(caches, 1):
        record = results.known.get(cache.name)
        console.print(f"{place}/{len(caches)} {cache.name}{' is known already' * (record is not None)}")
        if record is None:
            lm.set_cache(**cache.arguments, **how)
            record = evaluate(lm, manager, options)
            record = results.keep(cache, record) if lm.rank == 0 else record
        if lm.rank == 0:
            known = {name: record[name] for name in ("policy", "budget", "nbytes", "seconds")}
            rows.append({**known, "scores": scores_of(record["harness"])})
    lm.set_cache(FULL)
    if lm.rank == 0:
        versions = common.versions(lm_eval=importlib.metadata.version("lm_eval"))
        common.write_json(
            options.out / "results.json", {"versions": versions, "settings": results.settings, "rows": rows}
        )
        common.show(console, table_of(rows))
        console.print(
            "KiB is the largest cache of one sequence, everything counted; share: of the full cache.\n"
            f"{options.out / 'results.json'} written"
        )
    return rows


def load_model(where: str, gguf: dict[str, str], options: argparse.Namespace) -> Any:
    """The harness's model with the stock cache. Raises FastKVError if it cannot be loaded."""
    device = options.device or common.default_device()
    try:  # the harness takes another one where this is missing
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        why = pretrained.first_line(error)
        raise FastKVError(f"there is no device {device!r} here ({why}); leave --device out") from error
    with pretrained.loading(f"a model from {options.model}", "name a folder or a model, and check --model-args"):
        arguments = simple_parse_args_string(options.model_args)
        how: dict[str, Any] = {"batch_size": options.batch_size, "device": device, **gguf}
        return FastKVLM(where, **how, **arguments)


def evaluate(lm: Any, manager: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run the tasks with the cache that the model has: its bytes, seconds, and what the harness found. The last is
    empty in every process but the first.
    """
    started = time.perf_counter()
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    how = {"num_fewshot": options.num_fewshot, "limit": options.limit, **dict.fromkeys(seeds, options.seed)}
    try:
        found = lm_eval.simple_evaluate(lm, tasks=[*options.tasks], task_manager=manager, log_samples=False, **how)
    except ValueError as error:
        if "Sample larger than population" not in str(error):
            raise
        raise FastKVError(
            f"--num-fewshot must be fewer than a task has, got {options.num_fewshot}; ask for fewer"
        ) from error
    largest = lm.all_gather(torch.tensor([lm.cache_bytes], device=lm.device)).max()
    kept = {name: found[name] for name in KEPT if name in found} if found else {}
    return {"nbytes": int(largest), "seconds": time.perf_counter() - started, "harness": kept}


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table: bytes, share of the full cache, first metric of each task with its standard error."""
    columns: dict[str, tuple[str, Any, str]] = {
        "nbytes": ("KiB", common.kibibytes, ""),
        "share": ("share", "{:.1%}", ""),
    }
    for task, (first, *_) in rows[0]["scores"].items():
        less = "" if first["higher_is_better"] else ", less is better"
        columns[task] = (f"{task}\n{first['metric'].removesuffix(',none')}{less}", marked, "")
    firsts = ({task: scores[0] for task, scores in row["scores"].items()} for row in rows)
    told = [{**row, **first, "share": row["nbytes"] / rows[0]["nbytes"]} for row, first in zip(rows, firsts)]
    return common.table_of(told, ("policy", "budget"), columns)


def marked(score: dict[str, Any]) -> str:
    """A score with its standard error."""
    return f"{score['value']:.4g}" + ("" if score["stderr"] is None else f" ± {score['stderr']:.2g}")


def load_tasks(tasks: Sequence[str], include_path: str | None, metadata: dict[str, Any]) -> Any:
    """The harness's task manager, after all tasks were loaded once.

    Args: tasks: names or YAML files.  include_path: folder with the user's YAML files.  metadata: for all tasks.
    """
    manager = TaskManager(
        include_path=[TASK_FILES, *([include_path] if include_path else [])],
        # Indexing the thousands of tasks that come with the harness takes a while; files and own tasks do without.
        include_defaults=not all(Path(task).is_file() or task.startswith(OWN) for task in tasks),
        metadata=metadata,
    )
    for task in tasks:
        try:
            manager.load([task])
        except FastKVError:
            raise
        except KeyError as error:
            raise FastKVError(
                f"lm-evaluation-harness knows no task {task!r}; lm-eval ls tasks lists what it knows, --include-path "
                "adds your own"
            ) from error
        except UNUSABLE as error:  # without a package, a connection, a file, a configuration
            raise FastKVError(f"task {task} cannot be loaded ({pretrained.first_line(error)}); {ADVICE}") from error
    return manager


def metadata_of(words: list[str]) -> dict[str, Any]:
    """`--metadata` as the harness takes it: K=V words. Raises FastKVError for anything else."""
    try:
        return {name: value for word in words for name, value in key_val_to_dict(word).items()}
    except ValueError as error:
        raise FastKVError(f"metadata must be K=V, got {words}; for example max_seq_lengths=[4096,8192]") from error
