"""What one case is, and the budgets and ways of reading that all parts share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

CONTEXT = 1024
BUDGETS = (128, 256, 512)  # tokens per KV head that a cache of keys and values alone would keep: 12.5, 25 and 50 %
TIGHT = BUDGETS[:2]  # of the ablations; at half of the tokens nearly every variant is alike
BLOCK = "256"
READS = {
    "context": "text compressed before the question is known",
    "whole": "whole prompt, question included, read at once",
    BLOCK: f"prompt read in blocks of {BLOCK} tokens, question last",
}
FULL, FIDELITY, LANGUAGE = "full", "fidelity", "language"  # parts of their own


@dataclass(frozen=True)
class Case:
    """One cache, as `fastkv.patch` is told.

    Attributes:
        name: of the row.  policy: registered name.  tokens: the budget, turned into bytes.
        read: "context", "whole", or the tokens of a block.  hyper: of the policy; none: as the demo has it.
        correction, heads, sinks, recent, evict_every: as in `fastkv.patch` and `fastkv.Budget`.
        keys_only: share p_a / (1 - p_c) of VECTOR's approximated tokens; None for the rule of the library.
    """

    name: str
    policy: str
    tokens: int
    read: str = "context"
    hyper: dict[str, Any] = field(default_factory=dict)
    correction: str = "auto"
    heads: str = "uniform"
    sinks: int = 4
    recent: int = 16
    evict_every: int = 16
    keys_only: float | None = None

    @property
    def id(self) -> str:
        """What tells it from the other cases of its part."""
        return f"{self.name} | {self.read} | {self.tokens}"

    def record(self) -> dict[str, Any]:
        """All of it, as it stands in a file."""
        return asdict(self)
