"""Another model than the one of the leaderboard: `python -m perf.leaderboard.another MODEL`.

Each policy compresses the same texts, at equal tokens, with uniform and with calibrated heads. A base model knows no
questions, so it is asked to end the facts' sentences. What is measured stays: killed, it goes on where it was.
"""

from dataclasses import replace
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from fastkv import Budget, patched, unpatch
from fastkv.lab import facts
from fastkv.lab.pretrained import load
from fastkv.lab.reading import forced, read
from perf.engine import ROOT, parser_of
from perf.environment import environment

from .cells import add, missing
from .measure import TOLD, answered, judged, kl
from .times import HEADS

RESULTS = ROOT / "perf" / "results" / "leaderboard" / "another"
LENGTH, KEEPS = 2048, (0.5, 0.25)
NAMES = "keydiff compactor snapkv expected-attention kvzip fastkv fastkv-reread".split()


def to_end(tokenizer: Any, one: facts.Question) -> facts.Question:
    """Asks for the fact by the beginning of its sentence."""
    begins = f"\n\n{one.fact.partition(one.answer)[0].rstrip()}"
    return replace(one, ids=tokenizer(begins, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def run(name: str, texts: int) -> None:
    """Measure what is missing of a model, a directory or a GGUF file, cell by cell.

    Each cache reads for itself: a reading that is shared needs layers that are all compressed.
    """
    (model, tokenizer), keys = load(name), ("seed", "policy", "keep", "heads")
    told = {key: value for key, value in environment().items() if key in TOLD}
    file = RESULTS / f"{Path(name).stem}.jsonl"
    wanted = missing(file, (dict(zip(keys, one)) for one in product(range(texts), NAMES, KEEPS, HEADS)))
    for seed, cells in groupby(wanted, itemgetter("seed")):
        sample = facts.sample(tokenizer, LENGTH, seed)
        ids, on = torch.tensor([sample.prefix]), [sample.continuation]
        full = read(unpatch(model), ids)
        known = answered(model, tokenizer, full, ids, [to_end(tokenizer, one) for one in sample.questions])
        (goes_on,) = forced(model, full, on)
        for cell in cells:
            with patched(model, cell["policy"], Budget(keep=cell["keep"], heads=cell["heads"]), slots="model"):
                cache = read(model, ids)
                found = {"nbytes": cache.nbytes()} | (judged(model, tokenizer, cache, ids, known) if known else {})
                found["text_kl"] = kl(goes_on, forced(model, cache, on)[0]).mean().item()
            add(file, cell | found | told)
            print(f"text {seed + 1} of {texts}:", *cell.values(), f"{found.get('right')} right", flush=True)


def main() -> None:
    parser = parser_of("perf.leaderboard.another", __doc__)
    parser.add_argument("model", help="a directory or a GGUF file")
    parser.add_argument("--texts", type=int, default=6, metavar="N", help="how many (default: 6)")
    options = parser.parse_args()
    run(options.model, options.texts)


if __name__ == "__main__":
    main()
