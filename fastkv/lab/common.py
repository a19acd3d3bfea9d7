"""What the commands that measure share: models, texts and caches, results that are kept, tables and pictures."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
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
from ..api import patched
from ..budget import TIMES, UNITS, Budget
from ..calibration import replace_file, weights_digest
from ..config import EVICT_EVERY
from ..errors import FastKVError
from ..integrations.transformers import stock
from . import pretrained
from .cli import MADE
from .cli import SHORTEST as SHORTEST
from .reading import equal_bytes, full_layers

FULL = "full"  # the stock cache, under the name of a policy
SHARES: dict[str, Any] = {"sinks": 4, "recent": 16}  # tokens that are never evicted where no option says how many


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
    """Index, keys and values [B, Hkv, T, D] of the full-attention layers of a stock model after tokens [B, T]. Raises
    FastKVError if there are none, or if a number is not finite.
    """
    layers = full_layers(model.config)
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    model.base_model(input_ids=ids.to(model.device), **{stock.CACHE: cache}, use_cache=True)  # no lm_head, no logits
    for index in layers:
        pairs = cache.layers[index].keys, cache.layers[index].values
        if not all(one.isfinite().all() for one in pairs):
            raise FastKVError(
                f"keys and values must be finite, got NaN or infinity in layer {index}; load the model in bfloat16 or "
                "float32"
            )
        yield index, *pairs


# Caches.


def to_budget(value: int | str, **shares: Any) -> Budget:
    """A `Budget` from what fits into a command line: 512, "512", "16x", "keep=0.25", "bytes=2000000" or
    "quality=0.95".

    Args: shares: sinks, recent, layers and heads, as in `Budget`.
    """
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


@dataclass(frozen=True)
class Cache:
    """A cache that is measured: policy and budget as on the command line, and what `fastkv.patch` is told."""

    policy: str
    budget: Any
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """In file names and messages."""
        return self.policy if self.policy == FULL else f"{self.policy}-{self.budget}"

    def of(self, model: Any) -> AbstractContextManager[Any]:
        """The model with this cache, for the length of a with block."""
        return nullcontext(model) if self.policy == FULL else patched(model, **self.arguments)


TOLD = ("prefill_block", "evict_every", "correction", "slots")  # options that are arguments of `fastkv.patch`
SHARED = ("equal", "sinks", "recent", "layers", "heads", *TOLD)  # what must not differ in a table


def caches_of(options: argparse.Namespace, model: Any = None, **more: Any) -> list[Cache]:
    """The stock cache, then every policy at every budget, `fastkv.Budget`'s or in the shares of the options.

    Args: model: by whose tokens budgets are turned into bytes, unless the options share tokens; None: not yet.
        more: for `fastkv.patch`.
    Raises: FastKVError for a policy or a budget that nobody knows.
    """
    chosen, shares = vars(options), SHARES
    if "sinks" in chosen:
        shares = {name: chosen[name] for name in ("sinks", "recent", "layers", "heads")}
    told = {name: chosen[name] for name in TOLD if name in chosen} | more
    found = [Cache(FULL, "", {"policy": FULL})]
    for policy, text in product(options.policies, options.budgets):
        budget = to_budget(text, **shares)
        if model is not None and options.equal == "bytes" and budget.tokens is not None:
            every = chosen.get("evict_every", EVICT_EVERY)
            budget = equal_bytes(model.config, budget, model.dtype, evict_every=every)
        policies.get(policy)
        found.append(Cache(policy, text, {"policy": policy, "budget": budget, **told}))
    return found


@torch.no_grad()
def check_first(model: Any) -> None:
    """Read one token: raise FastKVError if the model refuses the cache that it has."""
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)


def each(
    model: Any, caches: Sequence[Cache], console: Console, steps: int = 1
) -> Iterator[tuple[Cache, Callable[[], None]]]:
    """Every cache, while the model has it, and what to call after each of its steps, for a bar. All are tried on one
    token before the first is handed out, so that what cannot be used is refused at once.
    """
    for cache in caches:
        with cache.of(model):
            check_first(model)
    with progress(console) as shown:
        bar = shown.add_task("", total=steps * len(caches))
        for done, cache in enumerate(caches, 1):
            shown.update(bar, description=cache.name)
            with cache.of(model):
                yield cache, partial(shown.advance, bar)
            shown.update(bar, completed=steps * done)
        shown.update(bar, description="done")


# Results.


class Results:
    """What the folder of --out knows of caches, a file for each, all with the same settings.

    Attributes: folder.  settings: what results must share to stand in one table.  known: by name of the cache.
    """

    def __init__(self, options: argparse.Namespace, names: str, caches: Sequence[Cache], model: Any) -> None:
        """names: of options that are settings, beside caches' and weights. Raises FastKVError if files have others."""
        make_folder(options.out)
        self.folder: Path = options.out
        shared = {name: getattr(options, name) for name in (*names.split(), *SHARED)}
        self.settings = json.loads(json.dumps({**shared, "weights": weights_digest(model)}, default=str))
        files = {cache.name: self.file(cache) for cache in caches}
        try:
            known = {name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.is_file()}
            settings = {name: dict(record["settings"]) for name, record in known.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise FastKVError(
                f"{self.folder} has damaged results ({error}); delete them or choose another --out"
            ) from error
        self.known: dict[str, Any] = known
        for name, (key, now) in product(settings, self.settings.items()):
            before = settings[name].get(key)
            if before != now:
                raise FastKVError(
                    f"{files[name]} was written with {key} {before}, this run has {now}; choose another --out or "
                    "delete the file"
                )

    def file(self, cache: Cache, suffix: str = ".json") -> Path:
        """Of a cache."""
        return self.folder / f"{cache.name}{suffix}"

    def keep(self, cache: Cache, found: dict[str, Any]) -> dict[str, Any]:
        """Write the file: its settings, the policy and budget of the cache, and what was found. Returns: all of it."""
        record = {"settings": self.settings, "policy": cache.policy, "budget": cache.budget, **found}
        write_json(self.file(cache), record)
        return record


def make_folder(path: Path) -> None:
    """Make the folder of --out. Raises FastKVError if that is not possible, or if nothing can be written there."""
    MADE.extend(one for one in (path, *path.parents) if not os.path.exists(one))
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "no permission")
    except OSError as error:
        raise FastKVError(f"cannot write to {path} ({error.strerror}); choose another directory") from error


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
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(width=None if terminal else width, highlight=False, markup=False, **options)


def show(console: Console, made: Table) -> None:
    """Print a table with all its digits; a narrow terminal wraps the lines."""
    before = console.width
    console.width = max(before, console.measure(made, options=console.options.update(max_width=1000)).maximum)
    console.print(made)
    console.width = before


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


Columns: TypeAlias = Mapping[str, tuple[str, str | Callable[[Any], str], str]]  # title, format and meaning


def kibibytes(number: float) -> str:
    """Of bytes, whole ones."""
    return f"{number / 2**10:.0f}"


def mebibytes(number: float) -> str:
    """Of bytes."""
    return f"{number / 2**20:.1f}"


def cells(numbers: Mapping[str, Any], columns: Columns) -> list[str]:
    """The named numbers in the format of their columns, - for None."""
    known = ((numbers[name], form.format if isinstance(form, str) else form) for name, (_, form, _) in columns.items())
    return ["-" if number is None else shown(number) for number, shown in known]


def table_of(
    rows: Sequence[Mapping[str, Any]], words: Sequence[str], columns: Columns, section: Sequence[str] = (), **more: Any
) -> Table:
    """A line for each row: what it has under `words`, then its numbers; a rule before a row with another `section`."""
    made = table(words, [title for title, _, _ in columns.values()], **more)
    for before, row in zip([rows[0], *rows], rows):
        if any(before[name] != row[name] for name in section):
            made.add_section()
        made.add_row(*(str(row[name]) for name in words), *cells(row, columns))
    return made


def legend(columns: Columns) -> str:
    """What the columns mean, a line for each."""
    return "\n".join(f"  {title:<8} {meaning}" for title, _, meaning in columns.values())


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, inches, without any global state of pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def finish(axis: Any, title: str = "", x: str = "", *, legend: bool = False) -> None:
    """Title, label, a light grid and no frame."""
    axis.grid(color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if title:
        axis.set_title(title, fontsize=10)
    if x:
        axis.set_xlabel(x)
    if legend:
        axis.legend(frameon=False, fontsize=9)
