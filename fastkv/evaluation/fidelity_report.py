"""What `fastkv fidelity` says of one cache: a row of numbers, and the table of all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from ..demo.measure import kept_tokens
from .equal_bytes import stored_bytes
from .fidelity import Fidelity, Full


@dataclass(frozen=True)
class Row:
    """One cache. Means over texts, fed tokens, layers and heads; None where nothing was evicted or nothing estimated.

    Attributes:
        context: tokens of a text, the fed ones included.
        budget: tokens per KV head that a cache without moments keeps in the same bytes.  kept: what this one keeps.
        nbytes: of the compressed layers, per sequence.  full_nbytes: of the full cache.
        error, own_error, cosine, retained_cosine, mass, estimated_mass, gap: see `Heads` and `Fidelity`.
        standard_error: of `error`, over texts; None for one text.
        agreement: share of equal next tokens.  kl: nats.  perplexity_ratio: to the full cache.
        layers: indices in the model.  by_head: name to [layers][Hq].  by_text: name to [texts].
    """

    policy: str
    context: int
    budget: int
    kept: float
    nbytes: int
    full_nbytes: int
    error: float
    standard_error: float | None
    own_error: float
    cosine: float | None
    retained_cosine: float | None
    mass: float
    estimated_mass: float | None
    gap: float | None
    agreement: float
    kl: float
    perplexity_ratio: float
    layers: list[int]
    by_head: dict[str, list[list[float | None]]]
    by_text: dict[str, list[float]]


def summarise(name: tuple[str, int, int], measured: Fidelity, full: Full) -> Row:
    """One row; name: policy, context and budget."""
    policy, context, budget = name
    heads = measured.heads
    numbers = {
        "error": measured.error,
        "own_error": heads.own_error,
        "cosine": heads.cosine,
        "retained_cosine": heads.retained_cosine,
        "mass": heads.mass,
        "estimated_mass": heads.estimated_mass,
        "gap": heads.gap,
    }
    means = {one: known(number.nanmean()) for one, number in numbers.items()}
    errors = measured.error.mean((0, 2, 3))
    kept = kept_tokens(measured.cache)
    assert kept is not None
    texts = {"error": errors, "own_error": heads.own_error.mean((0, 2, 3)), "kl": measured.kl.mean(-1)}
    texts["agreement"] = measured.agreement.double().mean(-1)
    return Row(
        policy=policy,
        context=context,
        budget=budget,
        kept=kept,
        nbytes=stored_bytes(measured.cache),
        full_nbytes=full.nbytes,
        **means,  # type: ignore[arg-type]
        standard_error=(errors.std() / math.sqrt(len(errors))).item() if len(errors) > 1 else None,
        agreement=measured.agreement.double().mean().item(),
        kl=measured.kl.mean().item(),
        perplexity_ratio=measured.excess.mean().exp().item(),
        layers=measured.layers,
        by_head={
            one: [[known(head) for head in layer] for layer in number.nanmean((1, 2))]
            for one, number in numbers.items()
        },
        by_text={one: number.tolist() for one, number in texts.items()},
    )


def known(number: Tensor) -> float | None:
    """A number, or None for NaN, which JSON does not have."""
    return None if number.isnan() else number.item()


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
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("policy", no_wrap=True)
    several = len({row.context for row in rows}) > 1
    for title in (*["context"] * several, "budget", *(title for title, _ in COLUMNS.values())):
        table.add_column(title, justify="right", no_wrap=True)
    for before, row in zip([rows[0], *rows], rows):
        if (row.context, row.budget) != (before.context, before.budget):
            table.add_section()
        numbers = {**vars(row), "nbytes": row.nbytes / 2**10}
        cells = ["-" if numbers[name] is None else form.format(numbers[name]) for name, (_, form) in COLUMNS.items()]
        table.add_row(row.policy, *[str(row.context)] * several, str(row.budget), *cells)
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
