"""`fastkv calibrate context`: fit how much of a context a wanted quality needs, for one model and some policies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from .. import policies
from ..errors import FastKVError
from .context_plot import write_plot
from .context_triples import LENGTHS, Triple, make_triples
from .fingerprint import describe, fingerprint
from .models import DEMO, load_model
from .quality import QualityCurve, retained, save

PENALTY = 2.0
STEEPEST = 50.0  # a curve beyond it is a step


def fit(triples: Sequence[Triple], penalty: float = PENALTY) -> tuple[float, float]:
    """alpha and beta of `fastkv.calibration.quality`, by asymmetric least squares (Compactor, Sec. 3.5).

    Minimised is the mean over (r, c, y) of w (f(r) - y)^2. Where the curve promises more quality than was measured,
    f > y, it asks for too small an r, and w = penalty; elsewhere w = 1. The paper names no penalty. With 2, an error
    that spoils answers weighs as much as two that waste memory; a large one gives the lower envelope of the triples.

    The unknowns are the steepness at the smallest and at the largest NLL: a scan of both finds the right valley, L-BFGS
    in float64 its bottom. Deterministic. If all NLLs are equal, alpha = 0. Steepness stays within +-50.

    Raises: FastKVError for no triples, numbers out of range, or a penalty that is not positive.
    """
    if not triples:
        raise FastKVError(
            "fit needs at least one triple (keep, nll, quality), got none; measure some with make_triples"
        )
    keep, nll, quality = torch.tensor(triples, dtype=torch.float64).T
    shares = torch.stack([keep, quality])
    if not (shares.ge(0).all() and shares.le(1).all() and nll.isfinite().all()):
        raise FastKVError("fit needs shares and qualities in [0, 1] and a finite nll, got others; check the triples")
    if not 0 < penalty < float("inf"):
        raise FastKVError(f"penalty must be a positive number, got {penalty}; 1 treats both errors alike")
    low, spread = nll.min(), nll.max() - nll.min()
    place = (nll - low) / spread if spread > 0 else torch.zeros_like(nll)

    def loss(ends: Tensor) -> Tensor:
        excess = retained(keep, torch.lerp(ends[..., :1], ends[..., 1:], place)) - quality
        return (torch.where(excess > 0, penalty, 1.0) * excess.square()).mean(-1)

    steps = torch.linspace(-STEEPEST, STEEPEST, 40, dtype=torch.float64)  # even, so that none is 0, where f is linear
    grid = torch.cartesian_prod(steps, steps)
    ends = grid[torch.stack([loss(row) for row in grid.split(40)]).argmin()].clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [ends], max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    @torch.enable_grad()
    def step() -> float:
        optimiser.zero_grad()
        error = loss(ends)
        error.backward()  # type: ignore[no-untyped-call]
        return float(error.detach())

    optimiser.step(step)
    first, last = (float(end) for end in ends.detach().clamp(-STEEPEST, STEEPEST))
    alpha = (last - first) / float(spread) if spread > 0 else 0.0
    return alpha, first - alpha * float(low)


def residual(triples: Sequence[Triple], alpha: float, beta: float) -> float:
    """Root mean square of measured minus fitted quality."""
    keep, nll, quality = torch.tensor(triples, dtype=torch.float64).T
    return float((quality - retained(keep, alpha * nll + beta)).square().mean().sqrt())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv calibrate context`."""
    parser.add_argument(
        "--model", default=DEMO, metavar="PATH", help="folder or name of the model (default: demo, the bundled one)"
    )
    parser.add_argument(
        "--policies",
        default="momentkv,keydiff,snapkv",
        metavar="NAME,...",
        help="policies to fit (default: %(default)s)",
    )
    parser.add_argument("--samples", type=int, default=12, metavar="N", help="texts of each length (default: 12)")
    parser.add_argument(
        "--lengths",
        default=",".join(map(str, LENGTHS)),
        metavar="N,...",
        help="tokens of the texts (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first text (default: 0)")
    parser.add_argument(
        "--penalty",
        type=float,
        default=PENALTY,
        metavar="W",
        help="weight of promising too much against promising too little (default: 2)",
    )
    parser.add_argument(
        "--query-aware",
        action="store_true",
        help="compress each context together with its question; the default compresses it before any question is "
        "known, so that the file holds for whatever is asked",
    )
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="where the files go (default: here)")


def run(options: argparse.Namespace) -> None:
    """Measure and fit every policy, print alpha, beta and residual, and write context.json and context.png."""
    console = Console()
    names, lengths = _parsed(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastKVError(f"cannot write to {options.out} ({error.strerror}); choose another directory") from error
    model, tokenizer = load_model(options.model)
    measured: dict[str, list[Triple]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as shown:
        bar = shown.add_task("", total=len(names) * len(lengths) * options.samples)
        for name in names:
            shown.update(bar, description=name)
            measured[name] = make_triples(
                model,
                tokenizer,
                name,
                lengths=lengths,
                samples=options.samples,
                seed=options.seed,
                text="demo" if options.model == DEMO else "english",
                query_aware=options.query_aware,
                progress=lambda: shown.advance(bar),
            )
        shown.update(bar, description="measured")
    curves = [_curve(name, triples, model.config, options) for name, triples in measured.items()]
    for curve in curves:
        console.print(
            f"{curve.policy:<12} alpha {curve.alpha:8.3f}  beta {curve.beta:8.3f}  residual {curve.residual:.3f}  "
            f"triples {curve.triples}",
            highlight=False,
        )
    file = options.out / "context.json"
    save(file, curves)
    write_plot([(curve, measured[curve.policy]) for curve in curves], options.out / "context.png")
    console.print(
        f"{file} and context.png written. Use the file with\nfastkv.Budget(quality=0.95, calibration={str(file)!r}).",
        highlight=False,
    )


def _parsed(options: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Names of policies and lengths of texts, checked before anything slow starts."""
    names = [name.strip() for name in options.policies.split(",") if name.strip()]
    if not names:
        raise FastKVError(f"policies must name at least one, got none; choose from {', '.join(policies.names())}")
    for name in names:
        policies.get(name)
    try:
        return names, [int(length) for length in options.lengths.split(",")]
    except ValueError:
        raise FastKVError(f"lengths must be whole numbers separated by commas, got {options.lengths!r}") from None


def _curve(policy: str, triples: Sequence[Triple], config: Any, options: argparse.Namespace) -> QualityCurve:
    """The fit to the triples of one policy, with what identifies it."""
    alpha, beta = fit(triples, options.penalty)
    return QualityCurve(
        alpha=alpha,
        beta=beta,
        policy=policy,
        fingerprint=fingerprint(config),
        model=describe(config),
        triples=len(triples),
        residual=residual(triples, alpha, beta),
        query_aware=options.query_aware,
    )
