"""One case of the verdict on the language model: next tokens and perplexity of held-out text, and attention errors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fastkv import patched
from fastkv.evaluation import fidelity
from tools.language_model import corpus, encoded, stretches

from .cases import PROSE, Case
from .trained import Settings, budget_of, held, load_bf16, mean_distance


class LanguageBench:
    """The language model, stretches of text that it was not trained on, and what the full cache makes of them.

    The last `settings.continued` tokens of a stretch are fed one at a time; what stands before them is the prompt.

    Args: directory: of the model; settings: of all results.
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.settings = settings
        self.model, tokenizer = load_bf16(directory)
        number, size = settings.seeds * settings.stretches, settings.context + settings.continued
        self.texts = stretches(encoded(tokenizer, corpus()[1]), number, size, settings.first)
        self.full = fidelity.read_full(self.model, self.texts, settings.continued)

    def run(self, case: Case) -> dict[str, Any]:
        """Measure one case.

        Returns: error, KL and log of the perplexity relative to the full cache, by seed; CPU seconds of the prompts.
        Raises: FastKVError if the cache does not hold the bytes of MomentKV.
        """
        parts = self.texts.split([self.settings.context, self.settings.continued], 1)
        budget = budget_of(self.model, case, self.texts[:1, :1])
        with patched(self.model, case.policy, budget, correction=case.correction), torch.no_grad():
            facts = held(self.model, case, budget, self.texts[:1, :1])
            began = time.process_time()
            cache = self.model(parts[0], logits_to_keep=1, use_cache=True).past_key_values
            seconds = time.process_time() - began
            attention, log_probs = fidelity.feed(self.model, parts[1], cache)
        kl = (self.full.log_probs.exp() * (self.full.log_probs - log_probs)).sum(-1).mean(-1)
        excess = fidelity.negative_log_likelihood(log_probs, self.texts) - self.full.nll
        numbers = {"error": mean_distance(attention, self.full.attention), "kl": kl, "excess": excess.mean(-1)}
        return {
            **{name: {PROSE: self.by_seed(values)} for name, values in numbers.items()},
            "prompt_seconds": round(seconds, 3),
            **facts,
        }

    def by_seed(self, numbers: Tensor) -> list[float]:
        """Means over the stretches of a seed; numbers [N]."""
        return numbers.unflatten(0, (self.settings.seeds, -1)).mean(-1).tolist()
