"""kvpress on texts that the leaderboard has read: run in an environment with kvpress, where fastkv has its facts alone.

    PATH/python -m perf.leaderboard.presses TEXTS OUT MODEL
    PATH/python -m perf.leaderboard.presses TIMES MODEL

TEXTS is what `measure.given` made, MODEL a directory, OUT gets a line for each text, press and share. A press
compresses a text while it reads it. Its cache then answers each question alone, at the positions of a cache that lost
nothing. TIMES holds tokens [1, N] to read to an eighth; what is timed is asked line by line, see `times`.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from fastkv.lab.facts import plain
from perf.speed.contenders import placed

from .cells import add, missing

NEW = 24  # tokens of an answer at most
KEEPS = (0.25, 0.125)


def _within(outer: Any, inner: Any, **how: Any) -> Callable[..., Any]:
    return lambda compression_ratio: outer(inner(compression_ratio=compression_ratio, **how))


ALONE = (
    "KVzipPress", "KVgradPress", "ExpectedAttentionPress", "SnapKVPress", "KeyDiffPress", "CompactorPress",
    "LeverageScorePress", "NonCausalAttnPress", "TOVAPress", "PyramidKVPress", "LagKVPress", "StreamingLLMPress",
    "KnormPress",
)  # fmt: skip
PRESSES: dict[str, Callable[..., Any]] = {  # given a compression_ratio
    **{name: getattr(kvpress, name) for name in ALONE},
    "KVzipPress(kvzip_plus_normalization=True)": partial(kvpress.KVzipPress, kvzip_plus_normalization=True),
    "AdaKVPress(ExpectedAttentionPress)": _within(kvpress.AdaKVPress, kvpress.ExpectedAttentionPress, epsilon=1e-2),
    "AdaKVPress(SnapKVPress)": _within(kvpress.AdaKVPress, kvpress.SnapKVPress),
    "AdaKVPress(CompactorPress)": _within(kvpress.AdaKVPress, kvpress.CompactorPress),
    "CriticalAdaKVPress(SnapKVPress)": _within(kvpress.CriticalAdaKVPress, kvpress.SnapKVPress),
}
# What is timed; the first is no press, and says how fast this environment is.
TIMED = (
    "full cache beside presses", "KeyDiffPress", "KnormPress", "StreamingLLMPress", "SnapKVPress",
    "ExpectedAttentionPress", "CompactorPress",
)  # fmt: skip
STEPS = 16
VERSIONS = {name: version(name) for name in ("kvpress", "torch", "transformers")}


class Compressed:
    """A cache of a text: it is asked, and then is what it was."""

    def __init__(self, model: Any, prefix: list[int], press: Any) -> None:
        self.model, self.cache, self.seen = model, DynamicCache(), len(prefix)
        with placed(model), nullcontext() if press is None else press(model):
            model(torch.tensor([prefix]), past_key_values=self.cache, logits_to_keep=1)  # as fastkv's reading ends
        self.sizes = [layer.keys.shape[2] for layer in self.cache.layers]

    def logits(self, ids: list[int], after: int = 0) -> Tensor:
        """[T, V] of tokens that follow the text and `after` more."""
        positions = torch.arange(self.seen + after, self.seen + after + len(ids))[None]
        found = self.model(torch.tensor([ids]), past_key_values=self.cache, position_ids=positions).logits
        return found[0].float()

    def forget(self) -> None:
        for layer, size in zip(self.cache.layers, self.sizes):
            layer.keys, layer.values = layer.keys[:, :, :size], layer.values[:, :, :size]

    def reply(self, ids: list[int], tokenizer: Any, answer: str) -> str:
        """Greedy tokens, until they hold the answer."""
        said: list[int] = []
        while len(said) < NEW:
            said.append(int(self.logits(said[-1:] or ids, after=len(ids) + len(said) - 1 if said else 0)[-1].argmax()))
            if said[-1] == tokenizer.eos_token_id or plain(answer) in plain(tokenizer.decode(said)):
                break
        self.forget()
        return str(tokenizer.decode(said, skip_special_tokens=True))


def divergence(full: Tensor, logits: Tensor) -> float:
    """Mean KL in nats from log-probabilities [T, V]."""
    return float((full.exp() * (full - logits.log_softmax(-1))).sum(-1).mean())


def cell(model: Any, tokenizer: Any, text: dict[str, Any], press: Any) -> dict[str, Any]:
    """As `measure.cell`."""
    torch.manual_seed(0)  # of Compactor's sketches
    cache, right, apart = Compressed(model, text["prefix"], press), 0, []
    for one in text["answers"]:
        right += plain(one["answer"]) in plain(cache.reply(one["ids"], tokenizer, one["answer"]))
        logits = cache.logits(one["ids"] + one["said"][:-1])
        apart.append(divergence(one["log_probs"], logits[-len(one["said"]) :]))
        cache.forget()
    text_kl = divergence(text["next"], cache.logits(text["continuation"]))
    return {"asked": len(apart), "right": right, "answer_kl": sum(apart) / len(apart), "text_kl": text_kl}


def loaded(where: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def times(tokens: str, where: str) -> None:
    """Print the versions; for each line of the standard input, "read" or "step", the seconds of each of `TIMED`."""
    model, ids = loaded(where), torch.load(tokens)[0].tolist()
    print(json.dumps(VERSIONS), flush=True)
    caches: dict[str, Compressed] = {}
    for turn, line in enumerate(sys.stdin):
        found = {}
        for name in TIMED:
            begun = time.perf_counter()
            if line.strip() == "read":
                press = PRESSES[name](compression_ratio=1 - KEEPS[1]) if name in PRESSES else None
                caches[name] = Compressed(model, ids, press)
                found[name] = time.perf_counter() - begun
                continue
            after = 1 + turn * (1 + STEPS)
            caches[name].logits(ids[:1], after)  # not counted, as in `times.stepped`
            begun = time.perf_counter()
            for step in range(1, 1 + STEPS):
                caches[name].logits(ids[:1], after + step)
            found[name] = (time.perf_counter() - begun) / STEPS
        print(json.dumps(found), flush=True)


@torch.no_grad()
def main(texts: str, out: str, where: str) -> None:
    """Measure what `out` lacks."""
    model, tokenizer = loaded(where), AutoTokenizer.from_pretrained(where)
    file, keys = Path(out), ("seed", "part", "policy", "keep")
    for text in torch.load(texts):
        every = ((text["seed"], 0, name, keep) for name in PRESSES for keep in KEEPS)
        for key in missing(file, (dict(zip(keys, one)) for one in every)):
            press = PRESSES[key["policy"]](compression_ratio=1 - key["keep"])
            row = key | cell(model, tokenizer, text, press) | text["told"] | VERSIONS
            add(file, row)
            print(f"text {row['seed']}: {row['policy']}, {row['keep']:g}: {row['right']}/{row['asked']}", flush=True)


if __name__ == "__main__":
    (times if len(sys.argv) == 3 else main)(*sys.argv[1:])
