"""Train the bundled model: `python -m fastkv.demo.train --out DIR`, or measure it: `--evaluate`.

Stage one repeats random words, so that attention learns to continue what it has seen; then come facts in filler, from
short to long. The loss counts the answers, and a little everything else. Many questions follow each text, so that one
long text gives many gradients. Everything is seeded, and evaluation uses seeds that training cannot reach.

From random weights a small model spends most of its training on finding the two-layer match "what followed these words
before?", too long for a CPU. So `initialise` puts a rough one into the first two layers; the training turns it into a
reader of facts of several words. On a machine that others use too, set OMP_WAIT_POLICY=passive: it is several times
faster, because a thread that waits for its delayed neighbour does not take its core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import MODEL_DIR, load
from .tasks import TASKS, VOCABULARY, build_tokenizer, generate, max_questions

HELD_OUT = 1_000_000  # text seeds below are for evaluation, those from here on for training
EVAL_LENGTHS = (1024, 2048, 4096, 8192)
IGNORE = -100
HEAD_DIM = 64
ROPE_THETA = 500_000.0
REST_WEIGHT = 0.1  # loss weight of the words that are not an answer
WARMUP_STEPS = 20
FINAL_RATE = 0.05  # the cosine ends at this share of the learning rate


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `batch` texts; each batch has one length, drawn from `lengths`, and a mix of `tasks`."""

    name: str
    steps: int
    batch: int
    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    questions: int = 16  # per text, or as many as the task allows


@dataclass(frozen=True)
class Round:
    """Stages under one warm-up and cosine; the second round starts from the stored weights of the first."""

    learning_rate: float
    stages: tuple[Stage, ...]


ROUNDS = (
    Round(
        1.5e-3,
        (
            Stage("repeats", 60, 16, (64, 96), tasks=()),
            Stage("short", 150, 16, (96, 128), questions=3),
            Stage("medium", 150, 8, (256, 384), questions=8),
            Stage("1k", 300, 3, (1024,)),
            Stage("2k", 100, 2, (1536, 2048), questions=24),
            Stage("4k", 120, 1, (3072, 4096, 5120), questions=24),
        ),
    ),
    Round(
        1e-3,
        (
            Stage("1k-2k", 200, 2, (1024, 2048), questions=24),
            Stage("1k-5k", 550, 1, (1024, 2048, 4096, 5120), questions=24),
        ),
    ),
)


@dataclass
class Record:
    """What the model card tells about a run, and where to resume; stored as training.json beside the weights."""

    seed: int
    threads: int
    rounds: int = 0  # finished
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def config() -> LlamaConfig:
    """Four layers, four query heads and two KV heads of `HEAD_DIM`."""
    tokenizer = build_tokenizer()
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


@torch.no_grad()
def initialise(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Random weights with a rough induction circuit in the first two layers.

    Every embedding is a random unit vector plus one common unit vector. Layer 0: queries and keys read only the common
    vector, so RoPE alone decides, and heads 0, 1, 2 look 1, 2, 3 words back and copy part of that word into a subspace
    of their own. Layer 1: two heads attend to the words that follow an earlier occurrence of the current word, two to
    those that stand two words after an earlier occurrence of the previous word, and all copy what they find. The later
    layers and all MLPs start at zero output.
    """
    hidden, dim = model.config.hidden_size, HEAD_DIM
    layers = model.model.layers
    basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q.T
    common, word, one_back, two_back, three_back = basis.split([1, dim, dim, dim, hidden - 1 - 3 * dim])
    common = common[0]

    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(std=hidden**-0.5, generator=generator)
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()

    embedding = model.model.embed_tokens.weight
    embedding -= torch.outer(embedding @ common, common)
    embedding.copy_(F.normalize(embedding, dim=1) + common)

    # The fastest rotations tell neighbours apart; a query turned back by d rotates into the key d words earlier.
    fast, sharpness = 6, 18.0
    rotation = ROPE_THETA ** (-torch.arange(dim // 2) / (dim // 2))[:fast]
    reader = common / (hidden / 2) ** 0.5  # gives 1 on every normed embedding
    first = layers[0].self_attn
    key = torch.zeros(dim)
    key[:fast] = sharpness
    first.k_proj.weight.copy_(torch.outer(key.repeat(2), reader))
    first.v_proj.weight.copy_(word.repeat(2, 1))
    for head, target in enumerate((one_back, two_back, three_back)):
        query = torch.zeros(dim)
        query[:fast] = sharpness * torch.cos((head + 1) * rotation)
        query[dim // 2 : dim // 2 + fast] = -sharpness * torch.sin((head + 1) * rotation)
        first.q_proj.weight[head * dim : (head + 1) * dim] = torch.outer(query, reader)
        first.o_proj.weight[:, head * dim : head * dim + len(target)] = 0.1 * target.T

    second = layers[1].self_attn
    second.k_proj.weight.copy_(1.4 * torch.cat([one_back, two_back]))
    second.q_proj.weight.copy_(1.4 * torch.cat([word, word, one_back, one_back]))
    copied = torch.linalg.qr(torch.randn(hidden, 2 * dim, generator=generator)).Q.T
    second.v_proj.weight.copy_(copied)
    second.o_proj.weight.copy_(0.3 * copied.view(2, dim, hidden).repeat_interleave(2, dim=0).flatten(0, 1).T)


def repeated_batch(stage: Stage, length: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Random words, repeated with a random period.

    Returns: ids and labels [B, length]; labels count the repetitions.
    """
    ids = torch.empty(stage.batch, length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    for row, label in zip(ids, labels):
        period = rng.randint(4, length // 2)
        pool = range(4, len(VOCABULARY))
        # Words that recur within a period force a match on more than the last word.
        words = rng.sample(pool, period) if rng.random() < 0.5 else rng.choices(rng.sample(pool, period // 2), k=period)
        row[:] = torch.tensor((words * (length // period + 1))[:length])
        label[period + 2 :] = row[period + 2 :]
    return ids, labels


def text_batch(
    stage: Stage, length: int, seed: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts followed by their questions and answers.

    Returns: ids and labels [B, T], padded right; labels count the answers and the <eos> after each.
    """
    rows = []
    for i in range(stage.batch):
        task = stage.tasks[(seed + i) % len(stage.tasks)]
        sample = generate(task, length, seed + i, min(stage.questions, max_questions(task, length)))
        ids = tokenizer(sample.context).input_ids
        labels = [IGNORE] * len(ids)
        for question, answer in zip(sample.questions, sample.answers):
            asked = tokenizer(question, add_special_tokens=False).input_ids
            told = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            ids += asked + told
            labels += [IGNORE] * len(asked) + told
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    padded = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
    counted = [labels + [IGNORE] * (width - len(labels)) for _, labels in rows]
    return torch.tensor(padded), torch.tensor(counted)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Cross entropy of the labelled words plus `REST_WEIGHT` times that of the others; and the labelled part alone."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    target, labelled = ids[:, 1:], labels[:, 1:] != IGNORE
    rest = ~labelled & (target != model.config.pad_token_id)
    each = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    main = each[labelled].mean()
    return main + REST_WEIGHT * each[rest].mean(), main.item()


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: str, length: int, texts: int, questions: int
) -> tuple[int, int]:
    """How many questions greedy decoding answers exactly, and how many were asked, on held-out seeds.

    The cache of each text is shared by its questions, which do not see each other. Answers are teacher-forced: that all
    words are the argmax is the same as that greedy decoding gives the answer.
    """
    right = total = 0
    for seed in range(texts):
        sample = generate(task, length, seed, min(questions, max_questions(task, length)))
        asked = tokenizer(list(sample.questions), add_special_tokens=False, return_tensors="pt").input_ids
        told = tokenizer(list(sample.answers), add_special_tokens=False, return_tensors="pt").input_ids
        cache = model(**tokenizer(sample.context, return_tensors="pt"), logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(len(asked))
        logits = model(input_ids=torch.cat([asked, told], dim=1), past_key_values=cache).logits
        guess = logits[:, asked.shape[1] - 1 : -1].argmax(-1)
        right += (guess == told).all(-1).sum().item()
        total += len(asked)
    return right, total


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


def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: int, questions: int, console: Console
) -> dict[tuple[str, int], tuple[int, int]]:
    """`accuracy` for every task and every length of `EVAL_LENGTHS`, printed line by line."""
    table = {}
    for length in EVAL_LENGTHS:
        for task in TASKS:
            right, total = table[task, length] = accuracy(model, tokenizer, task, length, texts, questions)
            console.print(f"{task:>8} at {length} tokens: {right} of {total} right, {right / total:.2%}")
    return table


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, record: Record, card: str = ""
) -> None:
    """Write weights (bf16), tokenizer, record and card, then swap the directory in: nobody reads half a model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    rounded = LlamaForCausalLM(model.config).bfloat16()
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=32,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    rounded.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    (fresh / "training.json").write_text(json.dumps(asdict(record), indent=2) + "\n")
    if card:
        (fresh / "README.md").write_text(card)
    fresh.chmod(0o755)  # mkdtemp and safetensors write for the owner only
    for file in fresh.iterdir():
        file.chmod(0o644)
    if out.exists():
        old = fresh.with_suffix(".old")
        os.rename(out, old)
        os.rename(fresh, out)
        shutil.rmtree(old)
    else:
        os.rename(fresh, out)


def card_of(record: Record, table: dict[tuple[str, int], tuple[int, int]], model: LlamaForCausalLM) -> str:
    """The model card, from measured numbers."""
    cfg = model.config
    size = sum(weight.numel() for weight in model.parameters())
    table_of_stages = [
        f"| {number}: {stage.name} | {stage.steps} | {stage.batch} | {', '.join(map(str, stage.lengths))} | "
        f"{', '.join(stage.tasks) or 'random words, repeated'} | {stage.questions if stage.tasks else ''} |"
        for number, part in enumerate(ROUNDS, 1)
        for stage in part.stages
    ]
    rows = []
    for task in TASKS:
        cells = [f"{right / total:.1%} ({right}/{total})" for right, total in (table[task, n] for n in EVAL_LENGTHS)]
        rows.append(f"| {task} | {' | '.join(cells)} |")
    longest = max(length for part in ROUNDS for stage in part.stages for length in stage.lengths)
    rates = " and ".join(f"{part.learning_rate:g}" for part in ROUNDS)
    newline = "\n"
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# fastkv demo model

A small Llama that answers questions about facts scattered in long texts, so that cache compression can be seen
and tested on trained weights without a download. It knows {cfg.vocab_size} words and nothing of the world.

**Architecture.** `LlamaForCausalLM`: {cfg.num_hidden_layers} layers, width {cfg.hidden_size},
MLP {cfg.intermediate_size}, {cfg.num_attention_heads} query heads and {cfg.num_key_value_heads} KV heads
of {HEAD_DIM}, RoPE base {ROPE_THETA:,.0f}, tied embeddings;
{size:,} parameters stored as bf16.

**Data.** Generated by `fastkv/demo/tasks.py`, one token per word: grammatical filler with facts at uniformly random
places and questions at the end; 24 facts per 1024 tokens, at most 48 (`hops`: 12 chains of two facts, at most 24).
`facts` asks for the three numbers of a two-word key, `pairs` for those of two keys, `hops` for a name and then for
the three numbers of that name. A question ends with the first words of its answer.

**Training.** `python -m fastkv.demo.train --seed {record.seed} --threads {record.threads}`:
{record.steps:,} steps, {record.tokens:,} tokens, {record.seconds / 60:.1f} minutes for the steps on {record.threads}
CPU threads{"" if record.rounds == len(ROUNDS) else " (stopped early)"};
torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}.
AdamW, learning rate {rates}, with {WARMUP_STEPS} steps of warm-up and a cosine in
each round, bf16 autocast; cross entropy of the answers plus {REST_WEIGHT:g} times that of all other words.
The weights do not start fully random: `initialise` puts a rough induction circuit into the first two layers.

| round: stage | steps | batch | lengths | tasks | questions per text, at most |
|---|---|---|---|---|---|
{newline.join(table_of_stages)}

**Accuracy.** Full cache, the stored bf16 weights computed in fp32, text seeds that training cannot reach. An answer
counts if greedy decoding gives every word of it. Training saw texts of up to {longest} tokens.

| task | {" | ".join(f"{n} tokens" for n in EVAL_LENGTHS)} |
|---|{"---|" * len(EVAL_LENGTHS)}
{newline.join(rows)}

Measure again with `python -m fastkv.demo.train --evaluate`.
"""


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
