"""`fastkv inspect`: read a text once with the stock model and measure the keys it leaves in the cache."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from .. import __version__
from ..errors import FastKVError
from ..rotary import Rotary
from . import geometry
from .dimension import dimensions
from .report import Layer, Report, advice, explain, table_of, write_plot

LEAST = geometry.SHORTEST  # tokens; fewer tell nothing about a cloud in 64 or more dimensions
MOST = 4096  # tokens of a longer text that are read unless --context says otherwise
DEMO_CONTEXT = 2048
FOREIGN = 0.25  # share of unknown tokens, all with the same embedding, beyond which the geometry is an artefact
ROOMY = 112  # columns of a table with spaces around


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv inspect`."""
    parser.add_argument(
        "--model", default="demo", metavar="PATH", help="a transformers model, or demo, the bundled one (the default)"
    )
    parser.add_argument(
        "--text",
        default="demo",
        metavar="FILE",
        help="a text in UTF-8, - for standard input, or demo, a generated one (the default)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens to read (default: {DEMO_CONTEXT} of demo, all of another text up to {MOST})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("fastkv-inspect"),
        metavar="DIR",
        help="where inspect.json and inspect.png go (default: fastkv-inspect)",
    )


def run(options: argparse.Namespace, console: Console | None = None) -> Report:
    """Print the table and the advice, and write inspect.json and inspect.png into `options.out`.

    Raises: FastKVError if the model, the text, the context or the directory cannot be used.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 100)
    if options.context is not None and options.context < LEAST:
        raise FastKVError(f"context must be at least {LEAST} tokens, got {options.context}; give a larger one")
    text = read_text(options.text, options.context or DEMO_CONTEXT)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastKVError(f"cannot write to {options.out} ({error.strerror}); choose another directory") from error
    model, tokenizer = load(options.model)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    if (options.context or LEAST) > longest:
        raise FastKVError(
            f"context must be at most {longest} tokens for {options.model}, got {options.context or LEAST}; give a "
            "smaller one or another model"
        )
    ids = tokens_of(text, tokenizer, longest, options)
    report = measure(model, ids, options, console)
    console.print(table_of(report, roomy=console.width >= ROOMY))
    console.print(explain(report), highlight=False)
    console.print("\n".join(advice(report)), highlight=False)
    versions = {"fastkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    record = {"versions": versions, **asdict(report), "advice": advice(report)}
    (options.out / "inspect.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    write_plot(report, options.out / "inspect.png")
    console.print(f"{options.out / 'inspect.png'} and {options.out / 'inspect.json'} written", highlight=False)
    return report


def read_text(source: str, words: int) -> str:
    """The text of a file, of standard input ("-"), or a generated one of about so many words ("demo")."""
    if source == "demo":
        from ..demo.tasks import generate

        sample = generate("facts", words, seed=0)
        return f"{sample.context} {sample.questions[0]} {sample.answers[0]}"
    if source == "-":
        return sys.stdin.read()
    try:
        return Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise FastKVError(f"cannot read the text {source} ({error.strerror}); give a file, - or demo") from error
    except UnicodeDecodeError as error:
        raise FastKVError(f"the text {source} is not UTF-8 (byte {error.start}); convert it first") from error


def load(name: str) -> tuple[Any, Any]:
    """A stock model in eval mode, on a GPU if there is one, and its tokenizer. Raises FastKVError if it cannot."""
    model: Any
    tokenizer: Any
    transformers.utils.logging.disable_progress_bar()
    try:
        if name == "demo":
            from ..demo import load as load_demo

            model, tokenizer = load_demo()
        else:
            model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
            tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise FastKVError(
            f"cannot load a model and its tokenizer from {name} ({reason}); give a directory that save_pretrained "
            "wrote, or demo"
        ) from error
    finally:
        transformers.utils.logging.enable_progress_bar()
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def tokens_of(text: str, tokenizer: Any, longest: int, options: argparse.Namespace) -> Tensor:
    """The first tokens of the text, [N]: `options.context` of them, or by default what the text and the model allow."""
    most = options.context or min(longest, DEMO_CONTEXT if options.text == "demo" else MOST)
    least = options.context or LEAST
    ids = torch.tensor(tokenizer(text, truncation=True, max_length=most).input_ids, dtype=torch.long)
    if len(ids) < least:
        raise FastKVError(
            f"the text {options.text} is too short, expected at least {least} tokens, got {len(ids)}; give a longer one"
            + (f" or a --context down to {LEAST}" if len(ids) >= LEAST else "")
        )
    unknown = 0.0 if tokenizer.unk_token_id is None else (ids == tokenizer.unk_token_id).float().mean().item()
    if unknown > FOREIGN:
        raise FastKVError(
            f"the tokenizer of {options.model} does not know {unknown:.0%} of the tokens of {options.text}, at most "
            f"{FOREIGN:.0%} make sense; give a text in its vocabulary"
        )
    return ids


def measure(model: Any, ids: Tensor, options: argparse.Namespace, console: Console) -> Report:
    """Run the model over tokens [N] and measure each full-attention layer."""
    lengths, window = geometry.prefix_lengths(len(ids)), geometry.window_length(len(ids))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("reading", total=None)
        cached = list(read(model, ids))
        if not cached:
            raise FastKVError(
                f"{options.model} has no full-attention layer, all its layers have a bounded cache; there is nothing "
                "to compress in it"
            )
        rotary, why = rotary_of(model)
        progress.update(bar, description="measuring", total=len(cached))
        layers = []
        for index, keys, values in cached:
            layers.append(measure_layer(index, keys, values, lengths, window, rotary))
            progress.advance(bar)
        progress.update(bar, description="done")
    return Report(options.model, options.text, len(ids), lengths, window, layers, why)


@torch.no_grad()
def read(model: Any, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Index, keys and values [Hkv, N, D] of the full-attention layers of a stock model after tokens [N]."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model.base_model(input_ids=ids[None].to(model.device), past_key_values=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:  # its subclasses are bounded by a sliding window
            continue
        assert layer.keys is not None and layer.values is not None
        if not (layer.keys.isfinite().all() and layer.values.isfinite().all()):
            raise FastKVError(
                f"keys and values must be finite, got NaN or infinity in layer {index}; load the model in another dtype"
            )
        yield index, layer.keys[0], layer.values[0]


def rotary_of(model: Any) -> tuple[Rotary | None, str | None]:
    """The rotary embedding, or why its keys cannot be un-rotated."""
    try:
        return Rotary.of(model).to(model.device), None
    except FastKVError as error:
        return None, str(error)


def measure_layer(
    index: int, keys: Tensor, values: Tensor, lengths: list[int], window: int, rotary: Rotary | None
) -> Layer:
    """All measurements of one layer from its keys [Hkv, N, D] at positions 0 to N - 1 and its values [Hkv, N, Dv]."""
    clouds = [dimensions(head) for head in keys]
    of_keys, of_values = geometry.norms(keys), geometry.norms(values)
    whole, windowed = geometry.dilution(keys, lengths), geometry.dilution(keys, lengths, window)
    rank = leverage = None
    if rotary is not None:
        positions = torch.arange(keys.shape[1], device=keys.device).expand(1, *keys.shape[:2])
        before = rotary.unrotate(keys.float()[None], positions)[0]
        rank, leverage = geometry.effective_rank(before).tolist(), geometry.leverage_share(before).tolist()
    return Layer(
        layer=index,
        pca=[cloud.pca for cloud in clouds],
        two_nn=[cloud.two_nn for cloud in clouds],
        mle=[cloud.mle for cloud in clouds],
        key_norm=of_keys.mean.tolist(),
        key_spread=of_keys.spread.tolist(),
        key_peak=of_keys.peak.tolist(),
        value_norm=of_values.mean.tolist(),
        value_spread=of_values.spread.tolist(),
        value_peak=of_values.peak.tolist(),
        anchor=geometry.anchor_similarity(keys).tolist(),
        unit_anchor=geometry.anchor_similarity(keys, "normalized_mean").tolist(),
        pull=whole.pull.tolist(),
        spread=whole.spread.tolist(),
        window_pull=windowed.pull.tolist(),
        window_spread=windowed.spread.tolist(),
        rank=rank,
        leverage=leverage,
    )
