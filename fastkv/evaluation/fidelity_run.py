"""`fastkv fidelity`: every policy and budget against the full cache on one text, all at equal bytes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from .. import Budget, FastKVError, __version__, patched, policies
from ..config import CORRECTIONS
from ..demo.run import policy_of
from ..demo.tasks import generate
from ..inspection.run import FOREIGN, load, read_text
from .equal_bytes import EVICT_EVERY, assert_equal_bytes, equal_bytes
from .fidelity import measure, read_full
from .fidelity_plot import PICTURES
from .fidelity_report import Row, explain, summarise, table_of

VECTORLESS = frozenset({"duoattention"})  # fixes what each head keeps, and so does VECTOR
MIN_CONTEXT = 96
SINKS, RECENT = 4, 16  # never evicted, as in `fastkv demo`


@dataclass(frozen=True)
class Preset:
    """What an option is where the command line does not say: the plain comparison, or a figure of the paper."""

    policies: tuple[str, ...] = ()
    budgets: tuple[int, ...] = (128, 256)
    correction: str = "auto"
    shorter: tuple[int, ...] = (1,)  # divisors of the context, each measured


PRESETS = {
    None: Preset(),
    2: Preset(("h2o",), (64, 128, 256, 512), "none", (4, 2, 1)),
    3: Preset(("h2o", "momentkv"), (128,)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv fidelity`."""

    def names(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    def numbers(text: str) -> list[int]:
        try:
            return [int(part) for part in names(text)]
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, got {text!r}") from None

    add = parser.add_argument
    add("--model", default="demo", metavar="PATH", help="a transformers model, or demo, the bundled one (the default)")
    add(
        "--text",
        default="demo",
        metavar="FILE",
        help="a text in UTF-8, - for standard input, or demo, generated ones that end with a question (the default)",
    )
    add("--context", type=int, default=1024, metavar="N", help="tokens of a text (default: 1024)")
    add("--steps", type=int, default=48, metavar="T", help="last tokens of it that are fed one at a time (default: 48)")
    add("--policies", "--policy", type=names, metavar="NAME,...", help="policies to compare (default: all)")
    add(
        "--budgets",
        "--budget",
        type=numbers,
        metavar="N,...",
        help="sizes of the cache, tokens per KV head (default: 128,256)",
    )
    add(
        "--correction",
        choices=tuple(CORRECTIONS),
        help="of all policies; auto is what the policy's paper does (the default); vector... lets some tokens keep "
        "their key only",
    )
    add(
        "--vector",
        type=Path,
        metavar="FILE",
        help="what fastkv calibrate vector wrote (default: vector.safetensors in the model's folder)",
    )
    add("--seeds", type=int, default=5, metavar="K", help="texts, or stretches of the text (default: 5)")
    add(
        "--figure",
        type=int,
        choices=(2, 3),
        help="measure and draw what this figure of the MomentKV paper shows: 2, why eviction errs; 3, what the moments "
        "recover (the second policy against the first)",
    )
    add("--out", type=Path, default=Path("fastkv-fidelity"), metavar="DIR", help="default: fastkv-fidelity")


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Measure every cache, print the table, and write fidelity.json and a picture into `options.out`.

    Raises: FastKVError if the model, the text, a policy or a number cannot be used.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 112)
    preset = PRESETS[options.figure]
    options = argparse.Namespace(**vars(options))
    options.correction = options.correction or preset.correction
    options.budgets = options.budgets or list(preset.budgets)
    options.policies = options.policies or list(preset.policies) or default_policies(options)
    check(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastKVError(f"cannot write to {options.out} ({error.strerror}); choose another directory") from error
    model, tokenizer = load(options.model)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize
    if options.context > longest:
        raise FastKVError(
            f"context must be at most {longest} tokens for {options.model}, got {options.context}; give a smaller one"
        )
    contexts = [options.context // divisor for divisor in preset.shorter]
    texts = [texts_of(tokenizer, options, context).to(model.device) for context in contexts]
    rows = list(compare(model, texts, options, console))
    console.print(table_of(rows))
    console.print(explain(rows, options.steps), highlight=False)
    write_json(rows, options)
    picture = options.out / ("fidelity.png" if options.figure is None else f"figure{options.figure}.png")
    PICTURES[options.figure](rows, picture)
    console.print(f"{picture} and {options.out / 'fidelity.json'} written", highlight=False)
    return rows


def default_policies(options: argparse.Namespace) -> list[str]:
    """All policies; DuoAttention only where there is a pattern for it, with the bundled model, and without VECTOR."""
    without = VECTORLESS if options.correction.startswith("vector") else ()
    known = [name for name in policies.names() if name != "duoattention" or options.model == "demo"]
    return [name for name in known if name not in without]


def check(options: argparse.Namespace) -> None:
    """Raise FastKVError for what is wrong already before a model is loaded."""
    shortest = options.context // max(PRESETS[options.figure].shorter)
    if shortest < MIN_CONTEXT:
        raise FastKVError(
            f"context must be at least {MIN_CONTEXT * max(PRESETS[options.figure].shorter)} tokens, got "
            f"{options.context}; give a larger one"
        )
    if not 2 <= options.steps < shortest:
        raise FastKVError(
            f"steps must be at least 2 and fewer than the {shortest} tokens of the shortest text, got {options.steps}; "
            "give another number or a larger --context"
        )
    if options.seeds < 1:
        raise FastKVError(f"seeds must be at least 1, got {options.seeds}; give the number of texts")
    if options.figure == 2 and len(options.policies) != 1:
        raise FastKVError(f"figure 2 is about one policy, got {len(options.policies)}; name one with --policies")
    if options.figure == 3 and (len(options.policies) != 2 or len(options.budgets) != 1):
        raise FastKVError(
            f"figure 3 compares two policies at one budget, got {len(options.policies)} and {len(options.budgets)}; "
            "name them with --policies and --budgets"
        )
    for policy in options.policies:
        policy_of(policy)


def texts_of(tokenizer: Any, options: argparse.Namespace, context: int) -> Tensor:
    """Tokens [K, context]: generated texts with seeds 0, 1, ..., or consecutive stretches of the given text."""
    if options.text == "demo":
        samples = [generate("facts", context, seed) for seed in range(options.seeds)]
        wholes = [f"{sample.context} {sample.questions[0]} {sample.answers[0]}" for sample in samples]
        stretches = [tokenizer(whole).input_ids[:context] for whole in wholes]
    else:
        bos = tokenizer.bos_token_id
        start = [bos] if bos in tokenizer("").input_ids else []
        ids = tokenizer(read_text(options.text, 0), add_special_tokens=False).input_ids
        each = context - len(start)
        stretches = [start + ids[index * each :][:each] for index in range(options.seeds)]
    short = next((stretch for stretch in stretches if len(stretch) < context), None)
    if short is not None:
        raise FastKVError(
            f"the text {options.text} is too short for {options.seeds} stretches of {context} tokens, the last has "
            f"{len(short)}; give a longer text, a smaller --context or fewer --seeds"
        )
    tokens = torch.tensor(stretches)
    unknown = 0.0 if tokenizer.unk_token_id is None else (tokens == tokenizer.unk_token_id).double().mean().item()
    if unknown > FOREIGN:
        raise FastKVError(
            f"the tokenizer of {options.model} does not know {unknown:.0%} of the tokens of {options.text}, at most "
            f"{FOREIGN:.0%} make sense; give a text in its vocabulary"
        )
    return tokens


def compare(model: Any, texts: list[Tensor], options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Every policy at every budget, for every context."""
    budgets = {
        tokens: equal_bytes(model.config, tokens, model.dtype, sinks=SINKS, recent=RECENT) for tokens in options.budgets
    }
    caches = [(policy, tokens) for tokens in options.budgets for policy in options.policies]
    for policy, tokens in caches:
        with fitted(model, policy, budgets[tokens], options):
            model(texts[0][:1, :1])  # a budget that is too small is refused now and not after minutes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("full cache", total=len(texts) * (1 + len(caches)))
        for text in texts:
            progress.update(bar, description=f"{text.shape[1]} tokens, full cache")
            full = read_full(model, text, options.steps)
            progress.advance(bar)
            for policy, tokens in caches:
                progress.update(bar, description=f"{text.shape[1]} tokens, {policy}, {tokens}")
                with fitted(model, policy, budgets[tokens], options):
                    measured = measure(model, text, options.steps, full)
                bound = budgets[tokens].bytes
                assert bound is not None
                assert_equal_bytes({policy: measured.cache}, bound)
                yield summarise((policy, text.shape[1], tokens), measured, full)
                progress.advance(bar)
        progress.update(bar, description="done")


def fitted(model: Any, policy: str, budget: Budget, options: argparse.Namespace) -> Any:
    """The model patched for one cache, as a context manager."""
    return patched(
        model,
        policy_of(policy),
        budget,
        evict_every=EVICT_EVERY,
        correction=options.correction,
        vector=options.vector,
    )


def write_json(rows: list[Row], options: argparse.Namespace) -> None:
    """fidelity.json: versions, options and rows."""
    chosen = ("model", "text", "context", "steps", "policies", "budgets", "correction", "vector", "seeds", "figure")
    record = {
        "versions": {"fastkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "options": {name: getattr(options, name) for name in chosen},
        "rows": [asdict(row) for row in rows],
    }
    (options.out / "fidelity.json").write_text(json.dumps(record, indent=2, allow_nan=False, default=str) + "\n")
