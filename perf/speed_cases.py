"""What is measured: cases, grouped into parts of a few minutes. Standard library only: peers read it too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product


@dataclass(frozen=True)
class Case:
    """One measurement, one process.

    Attributes:
        model: name in `speed_models.SHAPES`.  contender: full, fastkv or kvpress.  context: prompt tokens.
        batch: sequences; with `what` "largest" where doubling starts.
        policy, budget: which tokens stay and how many per KV head; none for the full cache.
        block: the prompt is read in blocks of that many tokens; None reads it whole.
        step: eager, compiled (static shapes; with CUDA graphs on a GPU) or captured (`fastkv.capture_decode`).
        what: decode (prompt, then steps), generate (a whole call), flat (steps at growing lengths), largest (decode at
            the largest batch that fits, found by doubling), profile (where the time of prompt and steps goes).
        round: how many processes before it measured the same, and one.
        new: tokens that generate makes.  samples, period: decode samples, and steps in each: a whole eviction period.
    """

    model: str
    contender: str
    context: int
    batch: int
    policy: str = ""
    budget: int = 0
    block: int | None = None
    step: str = "eager"
    what: str = "decode"
    new: int = 128
    samples: int = 8
    period: int = 16
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 2
    round: int = 1

    @property
    def name(self) -> str:
        """Unique within a part."""
        kept = f"-{self.policy}-{self.budget}" if self.policy else ""
        read = f"-blocks{self.block}" if self.block else ""
        step = "" if self.step == "eager" else f"-{self.step}"
        again = "" if self.round == 1 else f"-round{self.round}"
        return f"{self.what}-{self.model}-n{self.context}-b{self.batch}-{self.contender}{kept}{read}{step}{again}"

    @property
    def cache(self) -> str:
        """Who it is, for tables and legends."""
        read = "" if self.contender != "fastkv" or self.block is None else ", blocks"
        step = "" if self.step == "eager" else f", {self.step}"
        return " ".join(word for word in (self.contender, self.policy) if word) + read + step

    @property
    def room(self) -> int:
        """Tokens that are decoded after the prompt, at most."""
        return max(self.new, (self.samples + 2) * self.period)

    @property
    def warm(self) -> int:
        """Tokens of the prompt that is read before the clock starts."""
        return 2 * max(self.budget, self.block or 0, 512)

    def as_row(self) -> dict[str, object]:
        """Everything that names the case, for its row."""
        return {"id": self.name, "cache": self.cache, **asdict(self)}


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


def in_turn(cases: list[Case], rounds: int = 3) -> list[Case]:
    """Each case so many times, all of a round before the next: a busy minute of the machine then hits all alike."""
    return [replace(case, round=turn) for turn in range(1, rounds + 1) for case in cases]


def rivals(model: str, policies: Iterable[str] = ("keydiff", "momentkv"), budget: int = 512) -> list[Case]:
    """The full cache; fastkv in blocks; both ways of reading a prompt, and kvpress, for KeyDiff."""
    blocks = [kept("fastkv", model, policy, budget, block=512) for policy in policies]
    whole = [kept(who, model, "keydiff", budget) for who in ("fastkv", "kvpress")]
    return [full(model), *blocks, *whole]


SMALL = "llama-small"
BUDGETS = (256, 512, 1024, 2048)


def cpu_parts() -> dict[str, list[Case]]:
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
        "cpu_context": [*in_turn(grid(context, (16_384, 8192), (4,))), *grid(context, (4096, 2048), (4,))],
        "cpu_batch": grid(rivals(SMALL), (8192,), (1, 2, 4)),
        "cpu_budget": grid([*budgets, *others], (8192,), (4,)),
        "cpu_generate": in_turn(grid([full(SMALL), *whole, *blocks], (8192,), (4,), what="generate")),
        "cpu_flat": in_turn(
            grid(
                [kept("fastkv", SMALL, policy, block=512, samples=48) for policy in ("keydiff", "momentkv")],
                (131_072,),
                (1,),
                what="flat",
            )
        ),
        "cpu_profile": grid(rivals(SMALL), (8192,), (4,), what="profile"),
        "cpu_compiled": grid(compiled, (16_384,), (4,)),
        "cpu_families": [*families, *grid(gemma, (2048, 8192), (4,))],
        "cpu_long": grid(rivals(SMALL), (32_768,), (1,)),
    }


GPU = {"device": "cuda", "dtype": "bfloat16"}
LARGE = ("llama-3.1-8b", "llama-3.2-3b", "qwen3-4b", "gemma-3-12b")


def gpu_parts() -> dict[str, list[Case]]:
    """bf16, real shapes, graphs on both sides; prompts of the full cache are fed in blocks too, so that they fit."""
    parts = {}
    for model in LARGE:
        compiled = [
            full(model, block=2048, step="compiled"),
            *(kept("fastkv", model, policy, 1024, block=512, step="captured") for policy in ("keydiff", "momentkv")),
        ]
        eager = [full(model), kept("fastkv", model, "keydiff", 1024, block=512)]
        budgets = [
            kept("fastkv", model, policy, n, block=512, step="captured")
            for n in (256, 512, 2048, 4096)
            for policy in ("keydiff", "momentkv", "snapkv")
        ]
        peers = [] if model.startswith("gemma") else [kept("kvpress", model, "keydiff", 1024)]
        whole = kept("fastkv", model, "keydiff", 1024)
        calls = [full(model), full(model, step="compiled"), replace(whole, step="compiled"), *peers]
        calls += [replace(one, step="compiled") for one in compiled[1:]]
        flat = [kept("fastkv", model, "keydiff", 1024, block=512, step="captured", samples=16)]
        short = model.replace("-", "_").replace(".", "_")
        contexts = (32_768, 4096, 131_072, 8192, 16_384, 65_536)
        parts |= {
            f"gpu_{short}_context": grid(compiled, contexts, (1,)),
            f"gpu_{short}_batch": grid(compiled, (32_768,), (8, 4, 16, 2, 32, 64)),
            f"gpu_{short}_largest": grid(compiled, (32_768,), (8,), what="largest"),
            f"gpu_{short}_budget": grid(budgets, (32_768,), (8,)),
            f"gpu_{short}_eager": grid([*eager, whole, *peers], (32_768, 8192, 131_072), (1,)),
            f"gpu_{short}_generate": grid(calls, (32_768,), (1,), what="generate"),
            f"gpu_{short}_profile": grid(compiled, (32_768,), (8,), what="profile"),
            f"gpu_{short}_flat": grid(flat, (131_072,), (1,), what="flat"),
        }
    return {name: [replace(case, **GPU) for case in cases] for name, cases in parts.items()}  # type: ignore[arg-type]


PARTS = cpu_parts() | gpu_parts()


def toy(case: Case) -> Case:
    """The same case on a toy model, for dry runs: shorter, two samples of a few steps, nothing compiled."""
    model = "gemma-3-toy" if case.model.startswith("gemma") else "llama-toy"
    context = case.context // (64 if case.device == "cuda" else 16)
    small = {"context": min(context, 2048), "budget": case.budget // 4, "period": 4, "samples": 2, "new": 4}
    where = {"device": "cpu", "dtype": "float32", "threads": 1, "step": "eager"}
    what = "decode" if case.what == "largest" else case.what  # on a CPU nothing ends the doubling
    block = case.block and case.block // 4
    return replace(case, model=model, batch=min(case.batch, 4), block=block, what=what, **small, **where)  # type: ignore[arg-type]
