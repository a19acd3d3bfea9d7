"""`fastkv fidelity`: every policy and budget against the full cache on one text, all at equal bytes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import FastKVError, corrections, patched, policies
from ..demo import policy_of
from . import common, looks
from .equal_bytes import EVICT_EVERY, equal_bytes
from .fidelity import Row, check_steps, measure, read_full, summarise

VECTORLESS = frozenset({"duoattention"})  # fixes what each head keeps, and so does VECTOR
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
    add, option = parser.add_argument, partial(common.option, parser)
    common.add_model(parser)
    option("--text", common.DEMO, "a text in UTF-8, - for standard input, or demo, generated ones", "FILE")
    option("--context", 1024, "tokens of a text")
    option("--steps", 48, "last tokens of it that are fed one at a time", "T")
    add("--policies", "--policy", type=common.listed(), metavar="NAME,...", help="policies to compare (default: all)")
    sizes = "sizes of the cache, tokens per KV head (default: 128,256)"
    add("--budgets", "--budget", type=common.listed(int), metavar="N,...", help=sizes)
    auto = "of all policies; auto is what the policy's paper does (the default); vector... keeps some keys only"
    add("--correction", choices=("auto", *corrections.names()), help=auto)
    beside = "what fastkv calibrate vector wrote (default: vector.safetensors in the model's folder)"
    add("--vector", type=Path, metavar="FILE", help=beside)
    option("--seeds", 5, "texts, or stretches of the text", "K")
    figure = (
        "measure and draw what this figure of the MomentKV paper shows: 2, why eviction errs; 3, what the moments "
        "recover (the second policy against the first)"
    )
    add("--figure", type=int, choices=(2, 3), help=figure)
    common.add_out(parser, "fastkv-fidelity")


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Measure every cache, print the table, and write fidelity.json and a picture into `options.out`.

    Raises: FastKVError if the model, the text, a policy or a number cannot be used.
    """
    console = console or looks.console_of(112)
    preset = PRESETS[options.figure]
    options = argparse.Namespace(**vars(options))
    options.correction = options.correction or preset.correction
    options.budgets = options.budgets or preset.budgets
    options.policies = options.policies or preset.policies or default_policies(options)
    check(options)
    common.make_folder(options.out)
    model, tokenizer = common.load(options.model)
    common.check_length("context", options.context, model, options.model)
    contexts = [options.context // divisor for divisor in preset.shorter]
    texts = [texts_of(tokenizer, options, context).to(model.device) for context in contexts]
    rows = list(compare(model, texts, options, console))
    console.print(table_of(rows))
    console.print(explain(rows, options.steps), highlight=False)
    chosen = ("model", "text", "context", "steps", "policies", "budgets", "correction", "vector", "seeds", "figure")
    record = {"versions": common.versions(), "options": {name: getattr(options, name) for name in chosen}}
    common.write_json(options.out / "fidelity.json", {**record, "rows": [asdict(row) for row in rows]})
    picture = options.out / ("fidelity.png" if options.figure is None else f"figure{options.figure}.png")
    PICTURES[options.figure](rows, picture)
    console.print(f"{picture} and {options.out / 'fidelity.json'} written", highlight=False)
    return rows


def default_policies(options: argparse.Namespace) -> tuple[str, ...]:
    """All policies; DuoAttention only where there is a pattern for it, with the bundled model, and without VECTOR."""
    without = VECTORLESS if options.correction.startswith("vector") else ()
    known = [name for name in policies.names() if name != "duoattention" or options.model == common.DEMO]
    return tuple(name for name in known if name not in without)


def check(options: argparse.Namespace) -> None:
    """Raise FastKVError for what is wrong already before a model is loaded."""
    shortest = options.context // max(PRESETS[options.figure].shorter)
    if shortest < common.SHORTEST:
        least = common.SHORTEST * max(PRESETS[options.figure].shorter)
        raise FastKVError(f"context must be at least {least} tokens, got {options.context}; give a larger one")
    check_steps(shortest, options.steps)
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
    if options.text == common.DEMO:
        wholes = [common.demo_text("facts", context, seed) for seed in range(options.seeds)]
        stretches = [tokenizer(whole).input_ids[:context] for whole in wholes]
    else:
        bos = tokenizer.bos_token_id
        start = [bos] if bos in tokenizer("").input_ids else []
        ids = tokenizer("".join(common.documents(options.text)), add_special_tokens=False).input_ids
        each = context - len(start)
        stretches = [start + ids[index * each :][:each] for index in range(options.seeds)]
    short = next((stretch for stretch in stretches if len(stretch) < context), None)
    if short is not None:
        raise FastKVError(
            f"the text {options.text} is too short for {options.seeds} stretches of {context} tokens, the last has "
            f"{len(short)}; give a longer text, a smaller --context or fewer --seeds"
        )
    tokens = torch.tensor(stretches)
    common.check_known(tokenizer, tokens, options.model, options.text, "give a text in its vocabulary")
    return tokens


def compare(model: Any, texts: list[Tensor], options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Every policy at every budget, for every context."""
    budgets = {
        tokens: equal_bytes(model.config, tokens, model.dtype, sinks=SINKS, recent=RECENT) for tokens in options.budgets
    }
    caches = [(policy, tokens) for tokens in options.budgets for policy in options.policies]
    settings = {"evict_every": EVICT_EVERY, "correction": options.correction, "vector": options.vector}
    for policy, tokens in caches:
        with patched(model, policy_of(policy), budgets[tokens], **settings):
            model(texts[0][:1, :1])  # a budget that is too small is refused now and not after minutes
    with looks.progress(console) as progress:
        bar = progress.add_task("full cache", total=len(texts) * (1 + len(caches)))
        for text in texts:
            progress.update(bar, description=f"{text.shape[1]} tokens, full cache")
            full = read_full(model, text, options.steps)
            progress.advance(bar)
            for policy, tokens in caches:
                progress.update(bar, description=f"{text.shape[1]} tokens, {policy}, {tokens}")
                with patched(model, policy_of(policy), budgets[tokens], **settings):
                    measured = measure(model, text, options.steps, full)
                common.check_bytes(policy, measured.cache, budgets[tokens])
                yield summarise((policy, text.shape[1], tokens), measured, full)
                progress.advance(bar)
        progress.update(bar, description="done")


COLUMNS = {  # attribute: title and format
    "kept": ("kept", "{:.0f}"),
    "nbytes": ("KiB", "{:.0f}"),
    "error": ("error", "{:.3f}"),
    "standard_error": ("±", "{:.3f}"),
    "own_error": ("own", "{:.3f}"),
    "cosine": ("cosine", "{:.3f}"),
    "mass": ("mass", "{:.3f}"),
    "estimated_mass": ("est.", "{:.3f}"),
    "gap": ("gap", "{:.2f}"),
    "agreement": ("top-1", "{:.0%}"),
    "kl": ("KL", "{:.2g}"),
    "perplexity_ratio": ("ppl", "{:.3f}"),
}


def table_of(rows: Sequence[Row]) -> Table:
    """A row for each cache, a section for each context and budget."""
    several = len({row.context for row in rows}) > 1
    titles = (*["context"] * several, "budget", *(title for title, _ in COLUMNS.values()))
    table = looks.table(("policy",), titles, padding=(0, 1, 0, 0))
    for before, row in zip([rows[0], *rows], rows):
        if (row.context, row.budget) != (before.context, before.budget):
            table.add_section()
        numbers = looks.cells({**vars(row), "nbytes": row.nbytes / 2**10}, COLUMNS)
        table.add_row(row.policy, *[str(row.context)] * several, str(row.budget), *numbers)
    return table


def explain(rows: Sequence[Row], steps: int) -> str:
    """What the columns are."""
    sizes = {row.context: f"{row.full_nbytes / 2**10:.0f} KiB for {row.context} tokens" for row in rows}
    return f"""
Means over {len(rows[0].by_text["error"])} text(s), the last {steps} tokens of each fed one at a time.
The full cache takes {", ".join(sizes.values())}.
  budget      tokens per KV head that a cache without moments keeps; all policies get its bytes (KiB)
  kept        tokens per KV head that this cache keeps
  error, ±    mean |o - full| / |full| of attention outputs, against the run of the full cache; standard error
  own         the same with full from all pairs that the layer itself was given: what eviction costs there
  cosine      of the evicted tokens' output with its estimate from the moments; - without moments
  mass, est.  share of the attention that the evicted tokens should get, and its estimate
  gap         log mass of the evicted tokens minus log of its estimate (Jensen)
  top-1, KL   equal most likely next tokens, and divergence of the next-token distribution, nats
  ppl         perplexity of the fed tokens, relative to the full cache
"""


def write_errors(rows: Sequence[Row], path: Path) -> None:
    """A column for each budget, a line for each policy: errors of every layer, below without those of lower layers."""
    budgets = list(dict.fromkeys(row.budget for row in rows))
    figure = looks.figure(4.6 * len(budgets) + 0.8, 7.4)
    axes = figure.subplots(2, len(budgets), sharex=True, sharey="row", squeeze=False)
    for column, budget in enumerate(budgets):
        shown = [row for row in rows if row.budget == budget]
        for axis, name in zip(axes[:, column], ("error", "own_error")):
            for index, row in enumerate(shown):
                axis.plot(row.layers, by_layer(row, name), label=row.policy, **looks.style(index))
            looks.finish(axis)
            looks.of_layers(axis)
        size = max(row.nbytes for row in shown) / 2**10
        axes[0][column].set_title(f"cache of {size:.0f} KiB, {budget} tokens without moments", fontsize=11)
    axes[0][0].set_ylabel("against the full cache")
    axes[1][0].set_ylabel("against the layer's own pairs")
    title = f"attention output after up to {rows[0].context} tokens, mean relative error"
    looks.save(figure, path, title, legend_of=axes[0][0], columns=3 * len(budgets))


def write_figure_2(rows: Sequence[Row], path: Path) -> None:
    """Why eviction errs: how much attention is lost, and in which direction it would have pointed. As Figure 2."""
    longest, smallest = max(row.context for row in rows), min(row.budget for row in rows)
    one = next(row for row in rows if (row.context, row.budget) == (longest, smallest))
    figure = looks.figure(13, 7)
    (mass, cosine, away), (error, masses, errors) = figure.subplots(2, 3)
    for axis, name, title in (
        (mass, "mass", "(a) evicted mass"),
        (cosine, "retained_cosine", "(b) cosine of evicted and retained output"),
        (error, "own_error", "(d) relative error"),
    ):
        with_spread(axis, one, name, 0)
        mean = getattr(one, name)
        if mean is not None:
            axis.axhline(mean, label=f"mean {mean:.3f}", **looks.DASHED)
        axis.set_title(f"{title}, {smallest} of {longest} tokens", fontsize=10)
    away.plot(one.layers, [1 - value for value in by_layer(one, "retained_cosine")], **looks.style(0))
    away.set_title(f"(c) 1 - cosine, {smallest} of {longest} tokens", fontsize=10)
    for index, context in enumerate(sorted({row.context for row in rows})):
        line = sorted((row for row in rows if row.context == context), key=lambda row: row.budget)
        x, y = [row.budget for row in line], [row.mass for row in line]
        masses.plot(x, y, label=f"{context} tokens", **looks.style(index))
    looks.ticks(masses, sorted({row.budget for row in rows}), base=2)
    looks.from_zero(masses)
    masses.set_xlabel("budget, tokens per head")
    masses.set_title("(e) evicted mass", fontsize=10)
    for index, row in enumerate(sorted((row for row in rows if row.context == longest), key=lambda row: row.budget)):
        errors.plot(row.layers, by_layer(row, "own_error"), label=f"budget {row.budget}", **looks.style(index))
    errors.set_title(f"(f) relative error, {longest} tokens", fontsize=10)
    for axis in (mass, cosine, away, error, masses, errors):
        looks.finish(axis, legend=axis is not away)
        if axis is not masses:
            looks.of_layers(axis)
    looks.save(figure, path, f"what eviction by {one.policy} costs within a layer; bands span the heads")


def write_figure_3(rows: Sequence[Row], path: Path) -> None:
    """How much of the first policy's error the second recovers. As Figure 3."""
    base, better = rows
    figure = looks.figure(13, 4)
    samples, layers, cosine = figure.subplots(1, 3)
    pairs = base.by_text["own_error"], better.by_text["own_error"]
    samples.scatter(*pairs, color=looks.COLOURS[0], s=28, zorder=3)
    end = 1.08 * max(max(pairs[0]), max(pairs[1]), 1e-12)
    samples.plot([0, end], [0, end], **looks.DASHED)
    samples.set(xlim=(0, end), ylim=(0, end), xlabel=base.policy, ylabel=better.policy)
    samples.set_title("(a) relative error of each text", fontsize=10)
    before, after = by_layer(base, "own_error"), by_layer(better, "own_error")
    for index, (row, line) in enumerate(((base, before), (better, after))):
        layers.plot(row.layers, line, label=row.policy, **looks.style(index))
    for place, old, new in zip(base.layers, before, after):
        if old > max(before) / 100:  # the change of next to nothing says nothing
            layers.annotate(
                f"{new / old - 1:+.0%}", (place, max(old, new)), (0, 6), textcoords="offset points", ha="center"
            )
    layers.set_title("(b) relative error of each layer, and its change", fontsize=10)
    layers.margins(y=0.15)
    with_spread(cosine, better, "cosine", 1)
    cosine.set_ylim(top=1.02)
    cosine.set_title(f"(c) cosine of evicted output and estimate, {better.policy}", fontsize=10)
    for axis in (samples, layers, cosine):
        looks.finish(axis, legend=axis is layers)
        if axis is not samples:
            looks.of_layers(axis)
    sizes = f"over {base.context} tokens, each in the bytes of {base.budget} tokens"
    looks.save(figure, path, f"{better.policy} against {base.policy} {sizes}")


PICTURES = {None: write_errors, 2: write_figure_2, 3: write_figure_3}  # by number of the paper's figure


def by_layer(row: Row, name: str, reduce: Callable[[Iterable[float]], float] = fmean) -> list[float]:
    """One number for each layer, over its heads; NaN, which is not drawn, where none is known."""
    layers = [[head for head in layer if head is not None] for layer in row.by_head[name]]
    return [reduce(heads) if heads else float("nan") for heads in layers]


def with_spread(axis: Any, row: Row, name: str, index: int) -> None:
    """The mean of every layer in a band from its lowest to its highest head."""
    low, high = by_layer(row, name, min), by_layer(row, name, max)
    axis.fill_between(row.layers, low, high, color=looks.COLOURS[index], alpha=0.15, linewidth=0)
    axis.plot(row.layers, by_layer(row, name), **looks.style(index))
