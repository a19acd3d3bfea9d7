"""Train the bundled model, or measure it.

    python -m tools.demo_model --out build/demo_model --minutes 90     # two threads, some 75 minutes
    python -m tools.demo_model --evaluate

Everything is seeded, and evaluation uses seeds that training cannot reach. From random weights a small model spends
most of its training on finding the two-layer match "what followed these words before?", too long for a CPU. So
`circuit.initialise` puts a rough one into the first two layers; the training turns it into a reader of facts of several
words. On a machine that others use too, set OMP_WAIT_POLICY=passive: it is several times faster, because a thread that
waits for its delayed neighbour does not take its core.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from fastkv.demo import MODEL_DIR, load

from .card import accuracy, card_of, evaluate, save
from .circuit import build_tokenizer, config, initialise
from .training import HELD_OUT, ROUNDS, Record, Round, steps


def train(out: Path, record: Record, minutes: float, console: Console) -> None:
    """Run what is left of `ROUNDS` and leave the model in `out`, also after every stage.

    Args: record: of the finished rounds, updated; minutes: of wall time, after which training stops early. Seed and
    threads decide the weights.
    """
    deadline = time.monotonic() + 60 * minutes
    tokenizer = build_tokenizer()
    for part in ROUNDS[record.rounds :]:
        if record.rounds:
            model, _ = load(directory=out)
        else:
            model = LlamaForCausalLM(config())
            initialise(model, torch.Generator().manual_seed(record.seed))
        finished = train_round(model, tokenizer, part, out, record, deadline, console)
        record.rounds += finished
        save(model, tokenizer, out, record)
        if not finished:
            console.print(f"stopped after {minutes:g} minutes")
            return


def train_round(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    part: Round,
    out: Path,
    record: Record,
    deadline: float,
    console: Console,
) -> bool:
    """Train one round. Returns: whether it ended before `deadline`, in seconds of `time.monotonic`."""
    rng = random.Random(record.seed + 1000 * record.rounds)
    text_seed = HELD_OUT + record.seed * 10**9 + record.rounds * 10**8
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=sum(stage.steps for stage in part.stages), note="")
        for step in steps(model, tokenizer, part.stages, part.learning_rate, rng, text_seed, fused=True):
            stage = step.stage
            record.steps += 1
            record.tokens += step.tokens
            record.seconds += step.seconds
            note = f"step {step.number}/{stage.steps}, loss of answers {step.loss:.3f}"
            progress.update(bar, advance=1, description=f"{stage.name:>8}", note=note)
            if step.number % 50 == 0 or step.last:
                console.print(f"{stage.name:>8} {note}, {record.tokens:,} tokens in {record.seconds:.0f} s")
            if step.last:
                if stage.tasks:
                    model.eval()
                    length = max(stage.lengths)
                    marks = {task: accuracy(model, tokenizer, task, length, 8, 8) for task in stage.tasks}
                    scores = ", ".join(f"{task} {right}/{asked}" for task, (right, asked) in marks.items())
                    console.print(f"{stage.name:>8} held-out at {length} tokens: {scores}")
                save(model, tokenizer, out, record)
            if time.monotonic() > deadline and not progress.finished:
                return False
    return True


def main() -> None:
    """Train, measure and write the card, or with `--evaluate` only measure."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model",
        description="Train the bundled demo model, measure it and write its card.",
        epilog="example: python -m tools.demo_model --out build/demo_model --minutes 90",
    )
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="directory to write or measure (default: bundled)")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop training after so many minutes (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and texts (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--texts", type=int, default=25, help="texts per cell of the accuracy table (default: 25)")
    parser.add_argument("--questions", type=int, default=12, help="questions per text, at most (default: 12)")
    parser.add_argument("--resume", action="store_true", help="go on after the last finished round in --out")
    parser.add_argument("--evaluate", action="store_true", help="only measure the model in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    record = Record(args.seed, args.threads)
    if args.resume:
        record = Record(**json.loads((args.out / "training.json").read_text()))
    if not args.evaluate:
        train(args.out, record, args.minutes, console)
    model, tokenizer = load(directory=args.out)
    table = evaluate(model, tokenizer, args.texts, args.questions, console)
    if not args.evaluate:
        save(model, tokenizer, args.out, record, card_of(record, table, model))
        console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()
