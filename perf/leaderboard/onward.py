"""Texts that go on for 2,000 tokens after a prompt, token by token: how far the next ones are from the full cache's."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkv import FastKVCache, patched, policies, unpatch
from fastkv.integrations.transformers.stock import CACHE
from fastkv.lab import facts
from fastkv.lab.demo import DOCUMENT

from .measure import kl, tokens_of

SOURCES = {"prose": str(DOCUMENT), "reference": "topics", "docstrings": "library", "code": "code"}
AFTER = 2000  # tokens
PARTS = {"1 to 64": slice(0, 64), "65 to 500": slice(64, 500), "501 to 2,000": slice(500, AFTER)}


@dataclass(frozen=True)
class Onward:
    """A text of each source.

    Attributes: ids: [S, length + AFTER].  length: of the prompt.  hidden: [S, AFTER, E], the full cache's last states
        before each of the tokens after the prompt.
    """

    ids: Tensor
    length: int
    hidden: Tensor


@torch.no_grad()
def read(model: Any, tokenizer: Any, length: int, seed: int) -> Onward:
    """Draw a text of each source and read it with the stock model."""
    draw = random.Random(f"onward {seed}")
    ids = torch.tensor([facts.stretch(tokenizer, source, length + AFTER, draw) for source in SOURCES.values()])
    base = unpatch(model).get_decoder()
    hidden = [base(row[None, :-1]).last_hidden_state[0, length - 1 :] for row in ids]
    return Onward(ids, length, torch.stack(hidden))


@torch.no_grad()
def cell(model: Any, text: Onward, name: str, keep: float, settings: dict[str, Any]) -> dict[str, Any]:
    """KL, top-1 agreement and negative log-likelihood by source, under a share of the bytes of the prompt's cache."""
    policy = policies.get(name)
    budget, told = tokens_of(model, keep, text.length, "bytes", policy, settings)
    head = model.get_output_embeddings()
    apart, same, said, full_said = [], [], [], []
    with patched(model, policy, budget, **told):
        cache = FastKVCache(model)
        fed = text.ids[:, : text.length]
        for step in range(AFTER):
            logits = model(fed, **{CACHE: cache}, logits_to_keep=1).logits[:, -1].float()
            log_probs, full = logits.log_softmax(-1), head(text.hidden[:, step]).float().log_softmax(-1)
            fed = text.ids[:, text.length + step, None]
            apart.append(kl(full, log_probs))
            same.append((full.argmax(-1) == log_probs.argmax(-1)).float())
            said.append(-log_probs.gather(-1, fed)[:, 0])
            full_said.append(-full.gather(-1, fed)[:, 0])
        nbytes = cache.nbytes() // len(text.ids)
    found = torch.stack(apart)  # [AFTER, S]
    by_part = {part: found[steps].mean(0).tolist() for part, steps in PARTS.items()}
    rest = {"top1": same, "nll": said, "full_nll": full_said}
    means = {name: torch.stack(steps).mean(0).tolist() for name, steps in rest.items()}
    return {"tokens": budget.tokens, "nbytes": nbytes, "slots": told["slots"], "kl": by_part, **means}
