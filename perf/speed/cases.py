"""What one measurement is. Standard library only: peers read it too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


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
        """All of it, as it stands in a row."""
        return {"cache": self.cache, **asdict(self)}


def toy(case: Case) -> Case:
    """The same case on a toy model, for dry runs: shorter, two samples of a few steps, nothing compiled."""
    model = "gemma-3-toy" if case.model.startswith("gemma") else "llama-toy"
    small = {"context": min(case.context // 16, 2048), "budget": case.budget // 4, "period": 4, "samples": 2, "new": 4}
    where = {"device": "cpu", "dtype": "float32", "threads": 1, "step": "eager"}
    block = case.block and case.block // 4
    return replace(case, model=model, batch=min(case.batch, 4), block=block, **small, **where)  # type: ignore[arg-type]
