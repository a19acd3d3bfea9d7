"""What the commands that measure share: models and texts, options, results that are kept, tables and pictures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

from .. import __version__, policies
from ..budget import HEADS, TIMES, UNITS, Budget
from ..calibration.files import replace_file
from ..config import EVICT_EVERY
from ..errors import FastKVError
from ..integrations.transformers import stock
from ..reference import FORMATS, PLAIN
from . import facts, pretrained
from .equal_bytes import assert_equal_bytes, equal_bytes

TEXT = "topics"  # what is read where no text is given: Python's language reference
FULL = "full"  # the stock cache, under the name of a policy
POLICIES = ("momentkv", "keydiff", "snapkv")
EQUAL = (
    "what a budget in tokens means: the bytes of so many keys and values, so that a policy that stores more keeps "
    "fewer tokens (the default), or tokens"
)
MODEL = "smollm2 (SmolLM2-135M-Instruct, extra real), a folder, a .gguf file or a name on a hub"
TEXTS = f"a text in UTF-8, - for standard input, or {', '.join(facts.SOURCES)}, which come with Python"
SHORTEST = 96  # tokens of a text
FOREIGN = 0.25  # share of unknown tokens, all with the same embedding, beyond which a text means nothing to a model
SUFFIXES = (".txt", ".md")
PIECE = 1 << 20  # characters read at a time, so that a large file is read only as far as it is needed
COLOURS = ("#d1495b", "#00798c", "#edae49", "#5f4b8b", "#8d99ae", "#3a7d44", "#b56576", "#2f4858")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h", "<", ">")  # with the colours, forty different pairs
DASHED: dict[str, Any] = {"color": "#444444", "linestyle": (0, (4, 3)), "linewidth": 1.2}  # what others compare with


# Models.


def load(name: str, device: str | None = None, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """A model and its tokenizer as in `pretrained.load`, by default on a GPU if there is one."""
    model, tokenizer = pretrained.load(name, dtype, attn_implementation=None)
    return model.to(device or default_device()), tokenizer


def default_device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def longest_text(model: Any) -> int:
    """Tokens that the model's positions reach."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def check_length(what: str, tokens: int, model: Any, name: str) -> None:
    """Raise FastKVError for a text that is longer than the model's positions reach."""
    if tokens > longest_text(model):
        raise FastKVError(
            f"{what} must be at most {longest_text(model)} tokens for {name}, got {tokens}; give a smaller one or "
            "another model"
        )


def check_stock(what: str, model: Any) -> None:
    """Raise FastKVError, in the name of `what`, if the model is patched or in training."""
    kind = type(model).__name__
    if any("_fastkv_config" in vars(module) for module in model.modules()):
        raise FastKVError(
            f"{what} needs the stock model, got a patched {kind} whose cache is compressed; call fastkv.unpatch(model) "
            "first"
        )
    if model.training:
        raise FastKVError(f"{what} needs a model in eval mode, got {kind} in training; call model.eval()")


@torch.no_grad()
def read_stock(model: Any, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Index, keys and values [B, Hkv, T, D] of the full-attention layers of a stock model after tokens [B, T]."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model.base_model(input_ids=ids.to(model.device), **{stock.CACHE: cache}, use_cache=True)  # no lm_head, no logits
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if stock.is_compressed(layer):
            yield index, layer.keys, layer.values


# Texts.


def documents(source: str) -> Iterator[str]:
    """A text of `facts.SOURCES`, of a file, of the .txt and .md files of a folder by path, or of standard input ("-").

    Pieces end with a line, as far as lines are shorter than a piece.
    """
    if source in facts.SOURCES:
        yield facts.read(source)
        return
    path, typed = Path(source), source == "-"
    inside = (one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
    files = [path] if typed or path.is_file() else sorted(inside)
    if not files:
        what = f"a folder without {' or '.join(SUFFIXES)} files" if path.is_dir() else "nothing there"
        raise FastKVError(
            f"expected a text at {path}, got {what}; name a file, a folder, - or {', '.join(facts.SOURCES)}"
        )
    for one in files:
        try:
            with nullcontext(sys.stdin) if typed else open(one, encoding="utf-8") as file:
                while piece := file.read(PIECE) + file.readline():
                    yield piece
        except UnicodeDecodeError as error:
            name = "standard input" if typed else one
            raise FastKVError(f"{name} is not UTF-8 text; convert it or choose another file") from error
        except OSError as error:
            raise FastKVError(f"cannot read the text {one} ({error.strerror}); choose another one") from error


def start_of(tokenizer: Any) -> list[int]:
    """The start token, if the tokenizer has the habit of adding one."""
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer("").input_ids else []


def unknown_share(tokenizer: Any, ids: Tensor | Sequence[int]) -> float:
    """Share of tokens that stand for words the tokenizer does not know, 0 to 1."""
    unknown = tokenizer.unk_token_id
    return 0.0 if unknown is None else (torch.as_tensor(ids) == unknown).double().mean().item()


def check_known(tokenizer: Any, ids: Tensor | Sequence[int], model: str, text: str, advice: str) -> None:
    """Raise FastKVError for a text of which the tokenizer knows too little."""
    unknown = unknown_share(tokenizer, ids)
    if unknown > FOREIGN:
        raise FastKVError(
            f"the tokenizer of {model} does not know {unknown:.0%} of the words of {text}, at most {FOREIGN:.0%} make "
            f"sense; {advice}"
        )


# Options.


def listed(kind: Callable[[str], Any] = str) -> Callable[[str], tuple[Any, ...]]:
    """How argparse reads `a,b`: each once, as `kind`."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
        except ValueError:
            whole = "whole numbers" if kind is int else "numbers"
            raise argparse.ArgumentTypeError(f"expected {whole} separated by commas, got {text!r}") from None

    return parse


def check_some(name: str, entries: Sequence[Any], known: Sequence[str] | None = None) -> None:
    """Raise FastKVError for a list without entries, or with one that is not known."""
    if not entries:
        raise FastKVError(f"{name} must name at least one, got none; leave it out to use the default")
    unknown = [entry for entry in entries if known is not None and entry not in known]
    if unknown:
        raise FastKVError(f"{name} must be of {', '.join(known or ())}, got {unknown[0]!r}")


def option(parser: argparse.ArgumentParser, names: str, default: Any, help: str, metavar: str = "N") -> argparse.Action:
    """An option whose kind is that of its default, which the help names; names: one or several."""
    several = default if isinstance(default, tuple) else (default,)
    kind: Any = Path if isinstance(default, Path) else type(several[0])
    shown = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in several)
    return parser.add_argument(
        *names.split(),
        type=listed(kind) if isinstance(default, tuple) else kind,
        default=default,
        metavar=f"{metavar},..." if isinstance(default, tuple) else metavar,
        help=f"{help} (default: {shown})",
    )


def add_model(
    parser: argparse.ArgumentParser, out: str, what: str = "directory to write to", metavar: str = "DIR"
) -> None:
    """--model and --out."""
    option(parser, "--model", pretrained.SMOLLM2, MODEL, "PATH")
    option(parser, "--out", Path(out), what, metavar)


def make_folder(path: Path) -> None:
    """Make the folder of --out. Raises FastKVError if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastKVError(f"cannot write to {path} ({error.strerror}); choose another directory") from error


def add_caches(parser: argparse.ArgumentParser) -> None:
    """The options that say which caches are compared: policies, how much they keep, and when they evict."""
    option(parser, "--policies --policy", POLICIES, "policies to compare", "NAME")
    add = parser.add_argument
    option(parser, "--budgets --budget", ("128", "256"), "tokens per KV head, or 16x, keep=X, bytes=N, quality=X")
    add("--equal", choices=("bytes", "tokens"), default="bytes", help=EQUAL)
    option(parser, "--sinks", 4, "first tokens that stay")
    option(parser, "--recent", 32, "last tokens that stay")
    option(parser, "--layers", "uniform", "uniform, pyramid, or a weight for each layer, as 2,1,1,1", "SHARES")
    option(parser, "--heads", "calibrated", f"as in fastkv.Budget: {', '.join(HEADS)} or a file", "HOW")
    add("--prefill-block", type=int, metavar="N", help="tokens of a block (default: prompts are read whole)")
    option(parser, "--evict-every", EVICT_EVERY, "decode steps between evictions")
    option(parser, "--correction", "auto", "as in fastkv.patch", "NAME")
    add_slots(parser)


CACHE = ("equal", "sinks", "recent", "layers", "heads", "prefill_block", "evict_every", "correction", "slots")


def add_slots(parser: argparse.ArgumentParser, default: str = PLAIN.name) -> None:
    """The option that says how compressed caches store keys and values.

    Args: default: what the command compares unless it is told: bytes of tokens as the model has them, or whatever
        `fastkv.patch` makes of bytes.
    """
    what = f"how keys and values are stored, as in fastkv.patch (default: {default})"
    parser.add_argument("--slots", choices=("auto", *FORMATS), default=default, help=what)


def to_budget(value: int | str | Budget, **shares: Any) -> Budget:
    """A `Budget` from what fits into a command line: 512, "512", "16x", "keep=0.25", "bytes=2000000" or
    "quality=0.95".

    Args: shares: sinks, recent, layers and heads, as in `Budget`; a ready Budget has its own.
    """
    if isinstance(value, Budget):
        return value
    text = str(value)
    unit, _, number = (f"compress={text[:-1]}" if TIMES.fullmatch(text) else text).rpartition("=")
    unit = unit or "tokens"
    try:
        amount = UNITS[unit](number)
    except (KeyError, ValueError):
        raise FastKVError(
            f"budget must be a number of tokens, 16x or one of {', '.join(f'{unit}=...' for unit in UNITS)}, got "
            f"{value!r}; for example 512 or keep=0.25"
        ) from None
    return Budget(**{unit: amount}, **shares)


def given(text: str, options: argparse.Namespace, model: Any = None) -> Budget:
    """One of the budgets of the options; for a model in the bytes of its tokens, unless the options share tokens."""
    layers: Any = options.layers
    if layers not in ("uniform", "pyramid"):
        try:
            layers = [float(weight) for weight in layers.split(",")]
        except ValueError:
            raise FastKVError(
                f"layers must be uniform, pyramid, or a weight for each layer, got {layers!r}; for example 2,1,1,1"
            ) from None
    budget = to_budget(text, sinks=options.sinks, recent=options.recent, layers=layers, heads=options.heads)
    if model is None or options.equal == "tokens" or budget.tokens is None:
        return budget
    return equal_bytes(model.config, budget, model.dtype, evict_every=options.evict_every)


# Results.


@dataclass(frozen=True)
class Planned:
    """A cache that is to be measured, or was.

    Attributes: policy, budget: as on the command line; name: in file names and messages; file: of the result; settings:
    what results must share to stand in one table; record: what the file holds, None if there is none.
    """

    policy: str
    budget: str
    name: str
    file: Path
    settings: dict[str, Any]
    record: dict[str, Any] | None

    def keep(self, record: dict[str, Any]) -> None:
        """Write the file."""
        write_json(self.file, {"settings": self.settings, **record})


def planned(options: argparse.Namespace, settings: dict[str, Any]) -> list[Planned]:
    """Every cache of the options, the stock one first, and what the folder of --out knows of it."""
    check_some("policies", options.policies)
    check_some("budgets", options.budgets)
    for policy in options.policies:
        policies.get(policy)
    for budget in options.budgets:
        given(budget, options)
    make_folder(options.out)
    shared = {**settings, **{name: getattr(options, name) for name in CACHE}}
    shared = json.loads(json.dumps(shared, default=str))
    plan = []
    for policy, budget in [(FULL, ""), *product(options.policies, options.budgets)]:
        name = f"{policy}{budget and '-'}{budget}"
        file = options.out / f"{name}.json"
        record = json.loads(file.read_text()) if file.is_file() else None
        before = shared if record is None else record["settings"]
        for key, now in shared.items():
            if before.get(key) != now:
                raise FastKVError(
                    f"{file} was written with {key} {before.get(key)}, this run has {now}; choose another --out or "
                    "delete the file"
                )
        plan.append(Planned(policy, budget, name, file, shared, record))
    return plan


def arguments(cache: Planned, options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What `fastkv.patch` is told; no budget for the stock cache."""
    if cache.policy == FULL:
        return {"policy": FULL, "budget": None}
    settings = {name: getattr(options, name) for name in ("prefill_block", "evict_every", "correction", "slots")}
    return {"policy": cache.policy, "budget": given(cache.budget, options, model), **settings}


@torch.no_grad()
def check_first(name: str, model: Any, budget: Budget | None) -> None:
    """Read one token: raise FastKVError if the cache is refused, or has other bytes than a budget in bytes says."""
    cache = model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)[stock.CACHE]
    if budget is not None and budget.bytes is not None:
        assert_equal_bytes({name: cache}, budget.bytes)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write the whole file or nothing: an interrupted run leaves no half of one."""
    text = json.dumps(record, indent=2, default=lambda one: vars(one) if is_dataclass(one) else str(one))
    replace_file(path, f"{text}\n".encode())


def versions(**others: str) -> dict[str, str]:
    """Of what a result may depend on."""
    return {"fastkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__, **others}


# Tables and pictures.


def console_of(width: int = 100, **options: Any) -> Console:
    """The terminal, or `width` columns where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False, **options)


def progress(console: Console) -> Progress:
    """Bars that say what is done, how many of how many, and for how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def table(left: Sequence[str], right: Sequence[str], **options: Any) -> Table:
    """An empty table with words on the left and numbers on the right; options: of rich."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, **options)
    for title in left:
        made.add_column(title, no_wrap=True)
    for title in right:
        made.add_column(title, justify="right", no_wrap="\n" not in title)
    return made


Columns: TypeAlias = Mapping[str, tuple[str, str, str]]  # of a number: title, format and meaning


def cells(numbers: Mapping[str, float | None], columns: Columns) -> list[str]:
    """The named numbers in the format of their columns, - for None."""
    known = ((numbers[name], form) for name, (_, form, _) in columns.items())
    return ["-" if number is None else form.format(number) for number, form in known]


def legend(columns: Columns) -> str:
    """What the columns mean, a line for each."""
    return "\n".join(f"  {title:<8} {meaning}" for title, _, meaning in columns.values())


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, inches, without any global state of pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def style(index: int) -> dict[str, Any]:
    """How the line of that number is drawn; the first is the thickest."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linewidth": 2.4 if index == 0 else 1.6,
        "markersize": 7 if index == 0 else 6,
        "zorder": 30 - index,
    }


def finish(axis: Any, title: str = "", *, legend: bool = False, layers: bool = False) -> None:
    """A title, a light grid and no frame; layers: along the axis, whole numbers only, with zero in sight."""
    axis.grid(color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if title:
        axis.set_title(title, fontsize=10)
    if legend:
        axis.legend(frameon=False, fontsize=9)
    if layers:
        axis.set_xlabel("layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
        from_zero(axis)


def from_zero(axis: Any) -> None:
    """Stretch the axis until zero is in sight."""
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0), max(high, 0))


def ticks(axis: Any, places: Sequence[float], base: float = 10) -> None:
    """A logarithmic x axis that is labelled at these places only."""
    axis.set_xscale("log", base=base)
    axis.set_xticks(places, [f"{place:.0f}" for place in places])
    axis.set_xticks([], minor=True)


def save(figure: Any, path: Any, title: str, *, legend_of: Any = None, columns: int = 3) -> None:
    """Write the picture, with the legend of one axis below all of them."""
    if legend_of is not None:
        handles, labels = legend_of.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False, fontsize=9
        )
    figure.suptitle(title, fontsize=12)
    figure.savefig(path)
