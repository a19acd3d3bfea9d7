"""What slots of 8 and 4 bits cost a CPU: steps and prompts of one layer, beside slots in the model's dtype.

    python -m perf.slot_steps                       all shapes, into perf/results/slot_steps.json, about four minutes
    python -m perf.slot_steps --shapes b1-h8-d128   one of them, printed

The layers of a shape, one for each format, take turns, so that a busy minute hits all alike: a sample is an eviction
period of one, then of the next. What is reported is the median over the rounds of a sample's ratio to that of the
model's dtype in the same round, with the quantiles at 20 and 80 %; for prompts the ratio of the shortest times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fastkv import Budget, FastKVAttention
from fastkv.cpu import compiled
from fastkv.reference import FORMATS

from .engine import RESULTS, progress
from .environment import environment
from .speed.worker import now, spread

PERIOD, PROMPTS = 16, 3
POLICIES = ("keydiff", "fastkv")


@dataclass(frozen=True)
class Shape:
    """A layer: sequences, query and KV heads, numbers of a head, tokens kept, dtype of the model."""

    batch: int
    queries: int
    heads: int
    dim: int
    kept: int
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Unique."""
        return f"b{self.batch}-h{self.heads}-d{self.dim}-{self.kept}-{self.dtype}"

    def tokens(self, num: int, seed: int) -> list[Tensor]:
        """Random q, k and v."""
        generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, self.dtype)
        heads = self.queries, self.heads, self.heads
        return [torch.randn(self.batch, one, num, self.dim, generator=generator).to(dtype) for one in heads]


SHAPES = tuple(
    Shape(*sizes, dtype)
    for dtype, sizes in product(
        ("float32", "bfloat16"),
        ((1, 4, 2, 64, 256), (4, 8, 2, 64, 512), (1, 32, 8, 128, 512), (4, 32, 8, 128, 512), (1, 32, 8, 128, 4096)),
    )
)


class Decoding:
    """A layer whose slots hold a prompt, in the middle of a text."""

    def __init__(self, shape: Shape, policy: str, slots: str) -> None:
        heads = shape.queries, shape.heads, shape.dim
        prompt, self.token, self.times = shape.tokens(shape.kept + 512, 0), shape.tokens(1, 1), list[float]()
        for _ in range(PROMPTS):
            self.layer = FastKVAttention(*heads, policy, Budget(tokens=shape.kept), evict_every=PERIOD, slots=slots)
            start = now()
            self.layer(*prompt)
            self.times.append(now() - start)
        self.sample()

    def sample(self) -> float:
        """Microseconds per step of an eviction period."""
        start = now()
        for _ in range(PERIOD):
            self.layer(*self.token)
        return (now() - start) / PERIOD * 1e6


def measured(shape: Shape, policy: str, rounds: int) -> dict[str, Any]:
    """A row: microseconds of a step with the model's dtype, and the ratios of the other formats to it."""
    layers = {name: Decoding(shape, policy, name) for name in FORMATS}
    samples = [{name: layer.sample() for name, layer in layers.items()} for _ in range(rounds)]
    coded = [name for name in FORMATS if name != "auto"]
    return {
        "shape": asdict(shape),
        "policy": policy,
        "step_us": statistics.median(sample["auto"] for sample in samples),
        "step": {name: spread([sample[name] / sample["auto"] for sample in samples]) for name in coded},
        "prompt_ms": min(layers["auto"].times) * 1e3,
        "prompt": {name: min(layers[name].times) / min(layers["auto"].times) for name in coded},
    }


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the file if all shapes were asked for. Returns: 0."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.slot_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose name contains this")
    parser.add_argument("--rounds", type=int, default=40, help="samples of each layer (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    options = parser.parse_args(arguments)
    cases = [(shape, policy) for shape in SHAPES if options.shapes in shape.name for policy in POLICIES]
    if not cases:
        parser.error(f"no shape contains {options.shapes!r}; there are {', '.join(shape.name for shape in SHAPES)}")
    if isinstance(problem := compiled.library("codes"), str):
        parser.error(f"nothing was compiled, so that slots would be decoded for every step: {problem}")
    torch.set_num_threads(options.threads)
    rows = []
    with progress("slot steps", len(cases)) as done:
        for shape, policy in cases:
            done(f"{shape.name} {policy}")
            rows.append(measured(shape, policy, options.rounds))
    if options.shapes:
        print(json.dumps(rows, indent=1))
        return 0
    file = {"environment": environment(), "settings": vars(options), "rows": rows}
    path = RESULTS / "slot_steps.json"
    path.write_text(json.dumps(file, indent=1) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
