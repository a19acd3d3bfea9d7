"""What one measurement is, and all of them, in parts of a few minutes: two cores, fp32, small models.

Standard library only: peers read it too.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product


@dataclass(frozen=True)
class Case:
    """One measurement, one process.

    Attributes:
        model: name in `models.SHAPES`.  contender: full, fastkv or kvpress.  context: prompt tokens.
        batch: sequences.
        policy, budget: which tokens stay and how many per KV head; none for the full cache.
        block: the prompt is read in blocks of that many tokens; None reads it whole.
        step: eager, compiled (static shapes; with CUDA graphs on a GPU) or captured (`fastkv.capture_decode`).
        what: decode (prompt, then steps), generate (a whole call), flat (steps at growing lengths).
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
        kept = f"-{self.policy}-{self.budget}" if self.policy else ""
        read = f"-blocks{self.block}" if self.block else ""
        step = "" if self.step == "eager" else f"-{self.step}"
        again = "" if self.round == 1 else f"-round{self.round}"
        return f"{self.what}-{self.model}-n{self.context}-b{self.batch}-{self.contender}{kept}{read}{step}{again}"

    @property
    def cache(self) -> str:
        """Who it is, for tables and legends."""
        read = "" if self.block is None else ", blocks"
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
        return {"cache": self.cache, **asdict(self)}


def toy(case: Case) -> Case:
    """The same case on a toy model, for dry runs: shorter, two samples of a few steps, nothing compiled."""
    model = "gemma-3-toy" if case.model.startswith("gemma") else "llama-toy"
    small = {"context": min(case.context // 16, 2048), "budget": case.budget // 4, "period": 4, "samples": 2, "new": 4}
    where = {"device": "cpu", "dtype": "float32", "threads": 1, "step": "eager"}
    block = case.block and case.block // 4
    return replace(case, model=model, batch=min(case.batch, 4), block=block, **small, **where)


SMALL = "llama-small"


def kept(contender: str, policy: str = "", model: str = SMALL, budget: int = 512, **more: object) -> Case:
    """A compressed cache; context and batch are filled in by `grid`."""
    return Case(model, contender, 0, 0, policy, budget, **more)


def full(model: str = SMALL, **more: object) -> Case:
    return kept("full", "", model, 0, samples=4, **more)


def blocks(*policies: str, **more: object) -> list[Case]:
    """fastkv, which reads prompts in blocks."""
    return [kept("fastkv", policy, block=512, **more) for policy in policies]


def grid(caches: Iterable[Case], contexts: Iterable[int], batch: int = 4, **more: object) -> list[Case]:
    """Every cache at every context, all caches of one shape together."""
    return [replace(c, context=n, batch=batch, **more) for n, c in product(contexts, caches)]


def interleaved(cases: list[Case], rounds: int = 3) -> list[Case]:
    """Each case so many times, all of a round before the next: a busy minute of the machine then hits all alike."""
    return [replace(case, round=turn) for turn in range(1, rounds + 1) for case in cases]


def rivals(model: str = SMALL, *more: str) -> list[Case]:
    """The full cache; fastkv in blocks; both ways of reading a prompt, and kvpress, for KeyDiff."""
    whole = [kept(who, "keydiff", model) for who in ("fastkv", "kvpress")]
    return [full(model), *blocks("keydiff", "momentkv", *more, model=model), *whole]


WHOLE = [kept(who, policy) for policy in ("keydiff", "snapkv") for who in ("fastkv", "kvpress")]
GENERATING = [full(), *WHOLE, *blocks("keydiff", "snapkv", "momentkv")]
KEYDIFF = [[*blocks("keydiff", budget=n), kept("kvpress", "keydiff", budget=n)] for n in (256, 512, 1024, 2048)]
BUDGETED = [one for both in KEYDIFF for one in (*both, *blocks("momentkv", "snapkv", budget=both[0].budget))]
OTHERS = [*blocks("compactor"), kept("kvpress", "compactor"), kept("kvpress", "snapkv")]
GEMMA = [one for one in rivals("gemma-3-small") if one.contender != "kvpress"]  # see README.md
CONTEXT = rivals(SMALL, "fastkv")
PARTS: dict[str, list[Case]] = {
    "cpu_context": [*interleaved(grid(CONTEXT, (16_384, 8192))), *grid(CONTEXT, (4096, 2048))],
    "cpu_batch": [one for batch in (1, 2, 4) for one in grid(rivals(), (8192,), batch)],
    "cpu_budget": grid([*BUDGETED, *OTHERS], (8192,)),
    "cpu_generate": interleaved(grid(GENERATING, (8192,), what="generate")),
    "cpu_flat": interleaved(grid(blocks("keydiff", "momentkv", samples=48), (131_072,), 1, what="flat")),
    "cpu_compiled": grid([full(block=512), *blocks("keydiff", "momentkv")], (16_384,), step="compiled"),
    "cpu_families": grid(rivals("qwen3-small"), (2048, 8192)) + grid(GEMMA, (2048, 8192)),
}
