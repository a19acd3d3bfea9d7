"""Calibrated heads on another model than the one of the leaderboard: `python -m perf.leaderboard.another MODEL`.

Each policy compresses the same texts with heads that are alike and with heads that are calibrated, at equal tokens; the
divergence of the text that goes on is compared. What is measured stays: killed, it goes on where it was.
"""

import argparse
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fastkv import Budget, FastKVCache, patched, unpatch
from fastkv.lab import facts
from fastkv.lab.pretrained import load
from perf.engine import ROOT
from perf.environment import environment

from .cells import add, missing
from .measure import TOLD, kl
from .times import HEADS

RESULTS = ROOT / "perf" / "results" / "leaderboard" / "another"
LENGTH, KEEPS = 2048, (0.25, 0.125)
NAMES = "keydiff compactor snapkv expected-attention kvzip fastkv".split()


def along(model: Any, sample: facts.Sample, cache: Any) -> Tensor:
    """Log-probabilities [T, V] along the text that goes on, once the cache has read what comes before."""
    model(torch.tensor([sample.prefix]), past_key_values=cache, logits_to_keep=1)
    return model(torch.tensor([sample.continuation]), past_key_values=cache).logits[0].float().log_softmax(-1)


@torch.no_grad()
def run(name: str, texts: int) -> None:
    """Measure what is missing of a model, a directory or a GGUF file, cell by cell.

    Each cache reads for itself: a reading that is shared needs layers that are all compressed.
    """
    model, tokenizer = load(name)
    told = {key: value for key, value in environment().items() if key in TOLD}
    file, keys = RESULTS / f"{Path(name).stem}.jsonl", ("seed", "policy", "keep", "heads")
    wanted = missing(file, (dict(zip(keys, one)) for one in product(range(texts), NAMES, KEEPS, HEADS)))
    for seed, cells in groupby(wanted, itemgetter("seed")):
        sample = facts.sample(tokenizer, LENGTH, seed)
        full = along(model, sample, DynamicCache(config=unpatch(model).config))
        for cell in cells:
            with patched(model, cell["policy"], Budget(keep=cell["keep"], heads=cell["heads"]), slots="model"):
                cache = FastKVCache(model)
                found = {"text_kl": kl(full, along(model, sample, cache)).mean().item(), "nbytes": cache.nbytes()}
            add(file, cell | found | told)
            what = ", ".join(map(str, cell.values()))
            print(f"text {seed + 1} of {texts}: {what}: {found['text_kl']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.leaderboard.another", description=__doc__.split("\n")[0])
    parser.epilog = "example: python -m perf.leaderboard.another gemma-3-270m-q4_k_m.gguf"
    parser.add_argument("model", help="a directory or a GGUF file")
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="how many (default: 4)")
    options = parser.parse_args()
    run(options.model, options.texts)


if __name__ == "__main__":
    main()
