"""The cases, grouped into parts of a few minutes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from .cases import Case

Caches = Iterable[Case]


def full(model: str, **more: object) -> Case:
    """The full cache; context and batch are filled in by `grid`."""
    return Case(model, "full", 0, 0, samples=4, **more)  # type: ignore[arg-type]


def kept(contender: str, model: str, policy: str, budget: int = 512, **more: object) -> Case:
    """A compressed cache; context and batch are filled in by `grid`."""
    return Case(model, contender, 0, 0, policy, budget, **more)  # type: ignore[arg-type]


def grid(caches: Caches, contexts: Iterable[int], batches: Iterable[int], **more: object) -> list[Case]:
    """Every cache at every context and batch, all caches of one shape together."""
    shapes = product(contexts, batches)
    return [replace(c, context=n, batch=b, **more) for n, b in shapes for c in caches]  # type: ignore[arg-type]


def interleaved(cases: list[Case], rounds: int = 3) -> list[Case]:
    """Each case so many times, all of a round before the next: a busy minute of the machine then hits all alike."""
    return [replace(case, round=turn) for turn in range(1, rounds + 1) for case in cases]


def rivals(model: str, policies: Iterable[str] = ("keydiff", "momentkv"), budget: int = 512) -> list[Case]:
    """The full cache; fastkv in blocks; both ways of reading a prompt, and kvpress, for KeyDiff."""
    blocks = [kept("fastkv", model, policy, budget, block=512) for policy in policies]
    whole = [kept(who, model, "keydiff", budget) for who in ("fastkv", "kvpress")]
    return [full(model), *blocks, *whole]


SMALL = "llama-small"
BUDGETS = (256, 512, 1024, 2048)


def parts() -> dict[str, list[Case]]:
    """Two cores, fp32, small models: each part takes a few minutes."""
    budgets = [
        kept(who, SMALL, policy, n, block=512 if who == "fastkv" else None)
        for n in BUDGETS
        for who, policy in (("fastkv", "keydiff"), ("kvpress", "keydiff"), ("fastkv", "momentkv"), ("fastkv", "snapkv"))
    ]
    others = [
        kept("fastkv", SMALL, "compactor", block=512),
        kept("kvpress", SMALL, "compactor"),
        kept("kvpress", SMALL, "snapkv"),
    ]
    whole = [kept(who, SMALL, policy) for policy in ("keydiff", "snapkv") for who in ("fastkv", "kvpress")]
    blocks = [kept("fastkv", SMALL, policy, block=512) for policy in ("keydiff", "snapkv", "momentkv")]
    compiled = [
        full(SMALL, step="compiled", block=512),
        *(kept("fastkv", SMALL, policy, block=512, step="compiled") for policy in ("keydiff", "momentkv")),
    ]
    families = [*grid(rivals("qwen3-small"), (2048, 8192), (4,))]
    gemma = [c for c in rivals("gemma-3-small") if c.contender != "kvpress"]  # see README.md
    context = rivals(SMALL, ("keydiff", "momentkv", "fastkv"))
    return {
        "cpu_context": [*interleaved(grid(context, (16_384, 8192), (4,))), *grid(context, (4096, 2048), (4,))],
        "cpu_batch": grid(rivals(SMALL), (8192,), (1, 2, 4)),
        "cpu_budget": grid([*budgets, *others], (8192,), (4,)),
        "cpu_generate": interleaved(grid([full(SMALL), *whole, *blocks], (8192,), (4,), what="generate")),
        "cpu_flat": interleaved(
            grid(
                [kept("fastkv", SMALL, policy, block=512, samples=48) for policy in ("keydiff", "momentkv")],
                (131_072,),
                (1,),
                what="flat",
            )
        ),
        "cpu_compiled": grid(compiled, (16_384,), (4,)),
        "cpu_families": [*families, *grid(gemma, (2048, 8192), (4,))],
        "cpu_long": grid(rivals(SMALL), (32_768,), (1,)),
    }


PARTS = parts()
