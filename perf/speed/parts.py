"""The cases, grouped into parts of a few minutes: two cores, fp32, small models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from .cases import Case

SMALL = "llama-small"
BUDGETS = (256, 512, 1024, 2048)


def full(model: str, **more: object) -> Case:
    """The full cache; context and batch are filled in by `grid`."""
    return Case(model, "full", 0, 0, samples=4, **more)  # type: ignore[arg-type]


def kept(contender: str, policy: str, model: str = SMALL, budget: int = 512, **more: object) -> Case:
    """A compressed cache; context and batch are filled in by `grid`."""
    return Case(model, contender, 0, 0, policy, budget, **more)  # type: ignore[arg-type]


def blocks(*policies: str, model: str = SMALL, **more: object) -> list[Case]:
    """fastkv, which reads prompts in blocks."""
    return [kept("fastkv", policy, model, block=512, **more) for policy in policies]


def grid(caches: Iterable[Case], contexts: Iterable[int], batch: int = 4, **more: object) -> list[Case]:
    """Every cache at every context, all caches of one shape together."""
    return [replace(c, context=n, batch=batch, **more) for n, c in product(contexts, caches)]  # type: ignore[arg-type]


def interleaved(cases: list[Case], rounds: int = 3) -> list[Case]:
    """Each case so many times, all of a round before the next: a busy minute of the machine then hits all alike."""
    return [replace(case, round=turn) for turn in range(1, rounds + 1) for case in cases]


def rivals(model: str = SMALL, *more: str) -> list[Case]:
    """The full cache; fastkv in blocks; both ways of reading a prompt, and kvpress, for KeyDiff."""
    whole = [kept(who, "keydiff", model) for who in ("fastkv", "kvpress")]
    return [full(model), *blocks("keydiff", "momentkv", *more, model=model), *whole]


BUDGETED = [
    one
    for n in BUDGETS
    for one in (
        *blocks("keydiff", budget=n),
        kept("kvpress", "keydiff", budget=n),
        *blocks("momentkv", "snapkv", budget=n),
    )
]
OTHERS = [*blocks("compactor"), kept("kvpress", "compactor"), kept("kvpress", "snapkv")]
WHOLE = [kept(who, policy) for policy in ("keydiff", "snapkv") for who in ("fastkv", "kvpress")]
COMPILED = [full(SMALL, block=512), *blocks("keydiff", "momentkv")]
GEMMA = [one for one in rivals("gemma-3-small") if one.contender != "kvpress"]  # see README.md
GENERATED = [full(SMALL), *WHOLE, *blocks("keydiff", "snapkv", "momentkv")]
CONTEXT = rivals(SMALL, "fastkv")
PARTS: dict[str, list[Case]] = {
    "cpu_context": [*interleaved(grid(CONTEXT, (16_384, 8192))), *grid(CONTEXT, (4096, 2048))],
    "cpu_batch": [one for batch in (1, 2, 4) for one in grid(rivals(), (8192,), batch)],
    "cpu_budget": grid([*BUDGETED, *OTHERS], (8192,)),
    "cpu_generate": interleaved(grid(GENERATED, (8192,), what="generate")),
    "cpu_flat": interleaved(grid(blocks("keydiff", "momentkv", samples=48), (131_072,), 1, what="flat")),
    "cpu_compiled": grid(COMPILED, (16_384,), step="compiled"),
    "cpu_families": grid(rivals("qwen3-small"), (2048, 8192)) + grid(GEMMA, (2048, 8192)),
    "cpu_long": grid(rivals(), (32_768,), 1),
}
