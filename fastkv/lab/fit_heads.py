"""The command `fastkv calibrate heads`; `fastkv.calibrate_heads` does it."""

from __future__ import annotations

import argparse
from functools import partial

from rich.console import Console
from torch import Tensor

from ..integrations.transformers.calibrate import LENGTH, LONGEST, ROWS, TEXTS, calibrate_heads, sees_everything
from . import common, facts
from .fit_vector import say_use

KEEP = 0.25  # of the text, for the picture
SHADES = " ·░▒▓█"  # of a head that keeps next to nothing, ..., nearly all


def picture(shares: Tensor) -> str:
    """Layers from left to right and their heads below each other: the share of a text that each keeps.

    Args: shares: [layers, Hkv], as `HeadShares.shares` gives them for `KEEP`.
    """
    level = (shares * KEEP * (len(SHADES) - 1)).round().long().clamp(max=len(SHADES) - 1)
    rows = ["".join(SHADES[number] for number in head) for head in level.T.tolist()]
    title = f"what each head keeps of a text where a quarter stays ({len(level)} layers from left to right):"
    shades = ", ".join(f"{shade!r} {100 * place // (len(SHADES) - 1)} %" for place, shade in enumerate(SHADES))
    return "\n".join([title, *(f"  head {head:<3}|{row}|" for head, row in enumerate(rows)), f"  {shades}"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv calibrate heads`."""
    option = partial(common.option, parser)
    common.add_model(parser, "heads.safetensors", "file to write", "FILE")
    option("--text", "", "file to read instead of text that the model generates", "FILE")
    option("--seed", 0, "seed of the text")


def run(options: argparse.Namespace) -> None:
    """Calibrate, write the file, show which heads keep most and say how to use it."""
    console = Console(highlight=False)
    model, tokenizer = common.load(options.model)
    text = None
    if options.text:
        text = tokenizer(facts.read(options.text), return_tensors="pt", verbose=False)["input_ids"]
    total = TEXTS * ROWS * LENGTH if text is None else min(text.shape[1], LONGEST)
    total *= 1 + sees_everything(model)  # each token twice, or once
    with common.progress(console) as shown:
        bar = shown.add_task("calibrating", total=total)
        made = calibrate_heads(model, options.out, text, options.seed, lambda n: shown.advance(bar, n))
    console.print(picture(made.shares(KEEP)), highlight=False)
    use = f'fastkv.patch(model, budget=fastkv.Budget(keep=0.25, heads="{options.out}"))'
    say_use(options, console, made.tokens, use)
