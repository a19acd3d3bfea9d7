"""Train the bundled model: `python -m fastkv.demo.train --out DIR`, or measure it: `--evaluate`.

Stage one repeats random words, so that attention learns to continue what it has seen; then come facts in filler, from
short to long. The loss counts the answers, and a little everything else. Many questions follow each text, so that one
long text gives many gradients. Everything is seeded, and evaluation uses seeds that training cannot reach.

From random weights a small model spends most of its training on finding the two-layer match "what followed these words
before?", too long for a CPU. So `circuit.initialise` puts a rough one into the first two layers; the training turns it
into a reader of facts of several words. On a machine that others use too, set OMP_WAIT_POLICY=passive: it is several
times faster, because a thread that waits for its delayed neighbour does not take its core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from . import MODEL_DIR, load
from .card import accuracy, card_of, evaluate, save
from .circuit import config, initialise
from .curriculum import HELD_OUT, IGNORE, ROUNDS, Record, Round, repeated_batch, text_batch
from .tasks import build_tokenizer

REST_WEIGHT = 0.1  # loss weight of the words that are not an answer
WARMUP_STEPS = 20
FINAL_RATE = 0.05  # the cosine ends at this share of the learning rate


def loss_of(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Cross entropy of the labelled words plus `REST_WEIGHT` times that of the others; and the labelled part alone."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    target, labelled = ids[:, 1:], labels[:, 1:] != IGNORE
    rest = ~labelled & (target != model.config.pad_token_id)
    each = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    main = each[labelled].mean()
    return main + REST_WEIGHT * each[rest].mean(), main.item()


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    total = sum(stage.steps for stage in part.stages)
    done, recent = 0, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=total, note="")
        for stage in part.stages:
            model.train()
            for step in range(stage.steps):
                began = time.monotonic()
                if began > deadline:
                    return False
                length = rng.choice(stage.lengths)
                if stage.tasks:
                    ids, labels = text_batch(stage, length, text_seed, tokenizer)
                    text_seed += stage.batch
                else:
                    ids, labels = repeated_batch(stage, length, rng)
                optimizer.param_groups[0]["lr"] = part.learning_rate * rate(done, total)
                loss, answers = loss_of(model, ids, labels)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                recent = answers if step == 0 else 0.9 * recent + 0.1 * answers
                done += 1
                record.steps += 1
                record.tokens += ids.numel()
                record.seconds += time.monotonic() - began
                note = f"step {step + 1}/{stage.steps}, loss of answers {recent:.3f}"
                progress.update(bar, advance=1, description=f"{stage.name:>8}", note=note)
                if (step + 1) % 50 == 0 or step + 1 == stage.steps:
                    console.print(f"{stage.name:>8} {note}, {record.tokens:,} tokens in {record.seconds:.0f} s")
            if stage.tasks:
                model.eval()
                length = max(stage.lengths)
                marks = {task: accuracy(model, tokenizer, task, length, 8, 8) for task in stage.tasks}
                scores = ", ".join(f"{task} {right}/{asked}" for task, (right, asked) in marks.items())
                console.print(f"{stage.name:>8} held-out at {length} tokens: {scores}")
            save(model, tokenizer, out, record)
    return True


def rate(step: int, total: int) -> float:
    """Share of the learning rate: linear warm-up, then a cosine down to `FINAL_RATE`."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / total))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_RATE + (1 - FINAL_RATE) * cosine)


def main() -> None:
    """Train, measure and write the card, or with `--evaluate` only measure."""
    parser = argparse.ArgumentParser(prog="python -m fastkv.demo.train", description="Train the bundled demo model.")
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
