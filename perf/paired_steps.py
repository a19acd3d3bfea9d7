"""Is a decode step on this CPU faster in one source tree than in another? Both in turn: a busy minute hits both.

    python -m perf.paired_steps --before ../fastkv-before --after .

Each tree has a process of its own, which imports only its `fastkv`; everything else is of the tree of this file. Every
sequence has seen the same prompt: one row reads it, and the others are copies. A sample is some eviction periods of a
policy in one tree and right after it in the other; what is printed is the median of their ratios, after over before,
with the quantiles at 20 and 80 %. A round is a sample of every policy.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from .engine import ROOT, Deadline
from .speed import models
from .speed.cases import Case
from .speed.contenders import FastKV, Step
from .speed.worker import decode, now, spread

CASE = Case("llama-small", "fastkv", context=16_384, batch=4, budget=512, block=512)  # as in cpu_context
POLICIES = ("keydiff", "momentkv", "fastkv")
PERIODS = 3  # of a sample
LEAST = 5  # rounds


class Decoding:
    """One policy in the middle of a text.

    Args: policy: registered name.  context: tokens seen.
    """

    def __init__(self, policy: str, context: int) -> None:
        cpu = torch.device(CASE.device)
        model = models.build(CASE.model, cpu, torch.float32)
        case = Case(**vars(CASE) | {"policy": policy, "context": context})
        contender = FastKV(model, case)
        cache = contender.new_cache(context)
        token = contender.read(models.prompt(CASE.model, 1, context, cpu), cache)[:, -1:].argmax(-1)
        cache.batch_repeat_interleave(CASE.batch)
        self.step: Step = contender.step(cache)
        self.token = token.expand(CASE.batch, 1)
        self.position = torch.full((CASE.batch, 1), context)
        self.sample()

    def sample(self) -> float:
        """Milliseconds per step of some eviction periods."""
        steps, start = PERIODS * CASE.period, now()
        self.token = decode(self.step, self.token, self.position, steps)
        return (now() - start) / steps * 1e3


@torch.no_grad()
def serve(tree: Path, context: int, orders: IO[str]) -> None:
    """Print the file of the tree's library, "ready", and for every line of `orders`, a policy, the time of a sample."""
    sys.path.insert(0, str(tree))
    import fastkv

    print(fastkv.__file__, flush=True)
    torch.set_num_threads(CASE.threads)
    decoding = {policy: Decoding(policy, context) for policy in POLICIES}
    print("ready", flush=True)
    for line in orders:
        print(decoding[line.strip()].sample(), flush=True)


@contextmanager
def served(tree: Path, context: int) -> Iterator[subprocess.Popen[str]]:
    """A process that serves the tree; once this is open, its caches are full.

    Raises: SystemExit if there is no `fastkv` in the tree, or if it cannot run.
    """
    command = [sys.executable, "-m", "perf.paired_steps", "--serve", str(tree), "--context", str(context)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            place = Path(answer(process))
            if not place.is_relative_to(tree):
                raise SystemExit(f"{tree} has no fastkv: {place} was imported")
            answer(process)
            yield process
        finally:
            process.terminate()


def answer(process: subprocess.Popen[str], order: str = "") -> str:
    """What the process says next, after an order if there is one. Raises: SystemExit if it has ended."""
    assert process.stdin is not None and process.stdout is not None
    if order:
        process.stdin.write(f"{order}\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process ended; its last words are above")
    return line.strip()


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.paired_steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="a source tree of fastkv")
    parser.add_argument("--after", type=Path, metavar="DIR", default=ROOT, help="another one (default: this)")
    parser.add_argument("--rounds", type=int, default=25, help=f"at least {LEAST} (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=3.5, help="no more rounds after so many (default %(default)s)")
    parser.add_argument("--context", type=int, default=CASE.context, help="tokens seen (default %(default)s)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve, options.context, sys.stdin)
        return
    if options.before is None:
        parser.error("--before is needed")
    deadline = Deadline(options.minutes)
    samples: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    with (
        served(options.before.resolve(), options.context) as before,
        served(options.after.resolve(), options.context) as after,
    ):
        for turn in range(max(options.rounds, LEAST)):
            if turn >= LEAST and deadline.over:
                break
            for policy, mine in samples.items():
                mine.append((float(answer(before, policy)), float(answer(after, policy))))
    print(f"{options.context} tokens seen, {CASE.budget} kept, batch {CASE.batch}, {len(samples[POLICIES[0]])} rounds")
    for policy, mine in samples.items():
        old, new = (statistics.median(times) for times in zip(*mine))
        ratio = spread([after / before for before, after in mine])
        print(
            f"{policy:10s} before {old:6.2f} ms  after {new:6.2f} ms  after / before {ratio['p50']:.3f} "
            f"({ratio['p20']:.3f} to {ratio['p80']:.3f})"
        )


if __name__ == "__main__":
    main()
