"""The tasks of RULER for lm-evaluation-harness: fastkv_ruler_niah_single_1 and so on, in `../tasks/*.yaml`.

    fastkv eval --model PATH --tasks fastkv_ruler --metadata max_seq_lengths=[4096,8192] num_samples=20
    python -m fastkv.evaluation --model fastkv --model_args pretrained=PATH --tasks fastkv_ruler_vt --metadata ...

They are not the harness's own tasks "ruler", which need downloads. The group fastkv_ruler has the eleven tasks that
need no data, fastkv_ruler_qa the other two. What can be chosen is metadata, as for the harness's own tasks:

    max_seq_lengths    tokens of prompt and answer, a number or a list (4096)
    num_samples        texts of every length (100; the paper has 500)
    seed               of the texts (0)
    tokenizer          folder or name; by default that of the model
    haystack           file or folder of .txt and .md files instead of generated essays
    squad, hotpotqa    the files that fastkv_ruler_qa_1 and fastkv_ruler_qa_2 read
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...errors import FastKVError
from .. import ruler
from ..common import FOREIGN, first_line, unknown_share
from .niah import KINDS
from .qa import SOURCES
from .text import Sample, Tokenizer

PREFIX = "fastkv_ruler_"
LENGTHS, SAMPLES = 4096, 100


class RulerTask(ConfigurableTask):
    """One of the thirteen; the prompt is the text, greedy decoding answers, RULER's own metric marks.

    Metrics: "score", the mean over all texts; with several lengths also "score_4096" and so on.

    Args: config: of the harness: the name of the task, and the metadata above.
    Raises: FastKVError for metadata that cannot be used, or a file that is missing.
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
        tokenizer = tokenizer_of(metadata)
        essays = self.kind in KINDS and KINDS[self.kind].haystack == "essay"
        text = metadata.get("haystack") if essays else None
        data = metadata.get(SOURCES[self.kind].option) if self.kind in SOURCES else None
        rows = []
        for length in self.lengths:
            texts = written(self.kind, tokenizer, length, samples, seed, text, data)
            rows += [{"prompt": one.prompt, "answers": one.answers, "length": length} for one in texts]
        self.dataset = {"test": Dataset.from_list(rows)}
        self.config.generation_kwargs["max_gen_toks"] = texts[0].tokens_to_generate

    def marks(self, doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        """The score of one answer, under the names of the metrics it counts for."""
        mark = ruler.TASKS[self.kind].metric(results[0], tuple(doc["answers"]))
        return {"score": mark, **({f"score_{doc['length']}": mark} if len(self.lengths) > 1 else {})}


@lru_cache(maxsize=32)  # the harness loads a task anew for each cache it evaluates
def written(
    kind: str, tokenizer: Tokenizer, length: int, samples: int, seed: int, text: str | None, data: str | None
) -> tuple[Sample, ...]:
    """The texts of one length; a warning where the tokenizer does not know their words."""
    indices = tqdm(range(samples), desc=f"writing {kind}, {length} tokens", leave=False)
    found = tuple(ruler.generate(kind, tokenizer, length, seed, index, text=text, data=data) for index in indices)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        unknown = unknown_share(tokenizer, tokenizer(found[0].prompt, verbose=False).input_ids)
        if unknown > FOREIGN:
            warnings.warn(
                f"the tokenizer does not know {unknown:.0%} of the words of {kind}, so that its score means nothing; "
                "the bundled model reads the tasks of fastkv needles and fastkv demo",
                stacklevel=2,
            )
    return found


@lru_cache(maxsize=4)
def _loaded(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise FastKVError(
            f"cannot load a tokenizer from {name} ({first_line(error)}); name another with --metadata tokenizer=PATH"
        ) from error


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that lengths are counted with: of the metadata, or of the model that is evaluated.

    Raises: FastKVError if there is none.
    """
    given = metadata.get("tokenizer") or metadata.get("pretrained")
    if given is None:
        raise FastKVError(
            "RULER needs a tokenizer to write texts of a length, got none; pass --metadata tokenizer=PATH or "
            "--model_args pretrained=PATH"
        )
    return _loaded(given) if isinstance(given, str) else given


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
