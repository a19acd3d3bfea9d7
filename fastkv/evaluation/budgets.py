"""Budgets on a command line: what `fastkv eval` and `fastkv needles` let a user say, and what comes of it."""

from __future__ import annotations

import argparse
from typing import Any

from ..budget import Budget
from ..errors import FastKVError
from .equal_bytes import EVICT_EVERY, equal_bytes

UNITS = {"tokens": int, "keep": float, "bytes": int, "quality": float}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how much a cache keeps, and when."""
    parser.add_argument(
        "--budgets",
        "--budget",
        default="128,256",
        metavar="N,...",
        help="tokens per KV head, or keep=0.25, bytes=2000000, quality=0.95 (default: %(default)s)",
    )
    parser.add_argument(
        "--equal",
        choices=("bytes", "tokens"),
        default="bytes",
        help="what policies share at a budget in tokens: the bytes that so many tokens take, so that a policy that "
        "stores more than keys and values keeps fewer (the default), or the tokens",
    )
    parser.add_argument("--sinks", type=int, default=4, metavar="N", help="first tokens that stay (default: 4)")
    parser.add_argument("--recent", type=int, default=32, metavar="N", help="last tokens that stay (default: 32)")
    parser.add_argument(
        "--layers", default="uniform", metavar="SHARES", help="uniform, pyramid, or a weight for each layer, as 2,1,1,1"
    )
    parser.add_argument(
        "--heads", choices=("uniform", "adaptive"), default="uniform", help="as in fastkv.Budget (default: uniform)"
    )
    parser.add_argument(
        "--prefill-block", type=int, metavar="N", help="tokens of a block (default: prompts are read whole)"
    )
    parser.add_argument(
        "--evict-every", type=int, default=EVICT_EVERY, metavar="N", help="decode steps between evictions"
    )
    parser.add_argument("--correction", default="auto", metavar="NAME", help="as in fastkv.patch (default: auto)")


def to_budget(value: int | str | Budget, **shares: Any) -> Budget:
    """A `Budget` from what fits into a command line: 512, "512", "keep=0.25", "bytes=2000000" or "quality=0.95".

    Args: shares: sinks, recent, layers and heads, as in `Budget`; a ready Budget has its own.
    Raises: FastKVError if it is none of these.
    """
    if isinstance(value, Budget):
        return value
    unit, _, number = str(value).rpartition("=")
    unit = unit or "tokens"
    try:
        amount = UNITS[unit](number)
    except (KeyError, ValueError):
        raise FastKVError(
            f"budget must be a number of tokens or one of {', '.join(f'{unit}=...' for unit in UNITS)}, got {value!r}; "
            "for example 512 or keep=0.25"
        ) from None
    return Budget(**{unit: amount}, **shares)


def wanted(text: str, options: argparse.Namespace) -> Budget:
    """One of the budgets of the options, with their shares. Raises FastKVError if it is none."""
    layers: Any = options.layers
    if layers not in ("uniform", "pyramid"):
        try:
            layers = [float(weight) for weight in layers.split(",")]
        except ValueError:
            raise FastKVError(
                f"layers must be uniform, pyramid, or a weight for each layer, got {layers!r}; for example 2,1,1,1"
            ) from None
    return to_budget(text, sinks=options.sinks, recent=options.recent, layers=layers, heads=options.heads)


def given(text: str, options: argparse.Namespace, model: Any) -> Budget:
    """`wanted`, tokens turned into the bytes that so many take unless the options share tokens; shares stay."""
    budget = wanted(text, options)
    if options.equal == "tokens" or budget.tokens is None:
        return budget
    return equal_bytes(model.config, budget, model.dtype, evict_every=options.evict_every)


def listed(what: str, text: str) -> list[str]:
    """`a,b` as ["a", "b"], each once. Raises FastKVError for none."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise FastKVError(f"{what} must name at least one, got none")
    return found
