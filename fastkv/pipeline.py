"""transformers' pipeline "fastkv-text-generation", which importing this module registers.

import fastkv.pipeline
from transformers import pipeline

ask = pipeline("fastkv-text-generation", model="Qwen/Qwen3-4B-Instruct-2507", budget="8x")
ask(context=report, questions=["Who wrote it?", "When?"])["answers"]    # the context is read once
ask("Once upon a time")["generated_text"]
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .api import GREEDY, answers, as_chat, patch, patched
from .errors import FastKVError, is_whole
from .integrations.transformers.stock import CACHE

TASK = "fastkv-text-generation"
HERE = "<fastkv-question>"  # where the question goes in a message; no text has it


class FastKVTextGenerationPipeline(Pipeline):
    """Text generation with a compressed cache, and many questions about a context that is read once.

    Arguments of `transformers.pipeline` or of a call, which takes precedence:
        policy, budget, and the other arguments of `fastkv.patch`. The model is patched during the call. Without any of
            them the model is used as it is, patched or not.
        max_new_tokens: the most tokens of an answer (default: 50). Decoding is greedy.
        question or questions: about the context, which is compressed before it sees them. A tokenizer's chat template
            puts both into one message.
    Argument of a call:
        context: text that is read once, instead of a prompt.
    Returns: for a prompt {"generated_text"}, which includes the prompt; for a context {"answer"} or {"answers"}.
    Raises: FastKVError for questions without a context or a context without questions, or as `fastkv.patch`.
    """

    # What transformers.pipeline loads beside the model.
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_feature_extractor: Any = False
    _load_tokenizer: Any = True

    def __call__(  # type: ignore[override]
        self, inputs: Any = None, *, context: str | None = None, **options: Any
    ) -> Any:
        """See the class."""
        if (options.get("batch_size") or self._batch_size or 1) != 1:
            raise FastKVError(f"{TASK} reads one text at a time, got a batch_size; leave it out")
        asked = [name for name in ("question", "questions") if options.get(name) is not None]
        asked = asked or [*self._preprocess_params]  # those of the pipeline
        if (inputs is None) == (context is None) or len(asked) != (context is not None):
            given = [name for name, one in (("a prompt", inputs), ("a context", context)) if one is not None] + asked
            raise FastKVError(
                f"{TASK} needs a prompt, or a context with question=... or questions=[...], got "
                f"{' and '.join(given) or 'nothing'}"
            )
        return super().__call__(inputs if context is None else context, **options)

    def _sanitize_parameters(
        self, question: str | None = None, questions: Any = None, max_new_tokens: int | None = None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        asked = [question] if question is not None else questions
        listed = isinstance(asked, (list, tuple)) and asked and all(isinstance(q, str) for q in asked)
        if asked is not None and not listed:
            raise FastKVError(
                f"questions must be a list of at least one text, got {asked!r}; one goes into question=..."
            )
        if max_new_tokens is not None and not is_whole(max_new_tokens, 1):
            raise FastKVError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}")
        unknown = sorted(options.keys() - ({*inspect.signature(patch).parameters} - {"model"}))
        if unknown:
            raise FastKVError(f"{TASK} takes max_new_tokens and the arguments of fastkv.patch, got {unknown[0]!r}")
        forward: dict[str, Any] = {} if max_new_tokens is None else {"tokens": max_new_tokens}
        forward |= options  # each of its own: those of a call are added to those of the pipeline
        one = {} if asked is None else {"one": question is not None}
        return ({} if asked is None else {"questions": asked}), forward, one

    def preprocess(self, text: str, questions: list[str] | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Tokens of what is read once, and of what comes after it for each question."""
        tokenizer: Any = self.tokenizer
        whole = partial(tokenizer, return_tensors="pt", verbose=False)
        if questions is None:
            return {"ids": whole(text).input_ids, "text": text}
        if tokenizer.chat_template is None:
            before, after = text, ""
            ids, asked = whole(before).input_ids, [f"\n{question}" for question in questions]
        else:
            before, found, after = as_chat(tokenizer, [("user", f"{text}\n\n{HERE}")]).rpartition(HERE)
            if not found:
                raise FastKVError(
                    "questions about a context need a chat template that leaves messages as they are, got one that "
                    "changes them; set tokenizer.chat_template = None, or put the question into the prompt"
                )
            ids, asked = whole(before, add_special_tokens=False).input_ids, questions
        rows = [tokenizer(f"{question}{after}", add_special_tokens=False).input_ids for question in asked]
        return {"ids": ids, "questions": rows}

    def _forward(self, inputs: dict[str, Any], tokens: int = 50, **options: Any) -> Any:  # type: ignore[override]
        model: Any = self.model
        ids = inputs["ids"]
        with patched(model, **options) if options else nullcontext(), torch.no_grad():
            if "questions" not in inputs:
                written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **GREEDY)
                return {"written": written[0, ids.shape[1] :].tolist(), "text": inputs["text"]}
            cache = model(ids, use_cache=True, logits_to_keep=1)[CACHE]
            return {"written": answers(model, self.tokenizer, cache, ids, inputs["questions"], tokens)}

    def postprocess(self, outputs: dict[str, Any], one: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """As text."""
        tokenizer: Any = self.tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        if "text" in outputs:
            return {"generated_text": outputs["text"] + decode(outputs["written"])}
        said = [decode(row).strip() for row in outputs["written"]]
        return {"answer": said[0]} if one else {"answers": said}


PIPELINE_REGISTRY.register_pipeline(
    TASK, pipeline_class=FastKVTextGenerationPipeline, pt_model=AutoModelForCausalLM, type="text"
)
