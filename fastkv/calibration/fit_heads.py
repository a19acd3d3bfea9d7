"""The command `fastkv calibrate heads`; `fastkv.calibrate_heads` does it."""

from __future__ import annotations

import argparse
from functools import partial

from rich.console import Console

from ..evaluation import common, texts
from ..integrations.transformers.calibrate import LENGTH, LONGEST, ROWS, TEXTS, calibrate_heads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv calibrate heads`."""
    option = partial(common.option, parser)
    common.add_model(parser, "heads.safetensors", "file to write", "FILE")
    option("--text", "", "file to read instead of the model's own text", "FILE")
    option("--seed", 0, "of the model's own text")


def run(options: argparse.Namespace) -> None:
    """Calibrate, write the file, show which heads keep most and say how to use it."""
    console = Console(highlight=False)
    model, tokenizer = common.load(options.model)
    text = None
    if options.text:
        text = tokenizer(texts.read(options.text), return_tensors="pt", verbose=False)["input_ids"]
    total = 2 * (TEXTS * ROWS * LENGTH if text is None else min(text.shape[1], LONGEST))
    with common.progress(console) as shown:
        bar = shown.add_task("calibrating", total=total)
        made = calibrate_heads(model, options.out, text, options.seed, lambda n: shown.advance(bar, n))
    console.print(f"{options.out} written, from {made.tokens:,} tokens. Use it:")
    use = f'  fastkv.patch(model, budget=fastkv.Budget(keep=0.25, heads="{options.out}"))'
    console.print(use, soft_wrap=True, markup=False)
