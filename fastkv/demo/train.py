"""Train the bundled model: `python -m fastkv.demo.train --out DIR`, or measure it: `--evaluate`.

Stage one repeats random words, so that attention learns to continue what it has seen; then come facts in filler, from
short to long. The loss counts the answers, and a little everything else. Many questions follow each text, so that one
long text gives many gradients. Everything is seeded, and evaluation uses seeds that training cannot reach.

Small models find the two-layer match "what followed these words before?" only after many thousand steps on a CPU, so
`initialise` puts a rough one into the first two layers; the training turns it into a reader of multi-word facts.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
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
REST_WEIGHT = 0.1  # loss weight of the words that are not an answer
LEARNING_RATE = 1.5e-3
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


STAGES = (
    Stage("repeats", 60, 16, (64, 96), tasks=()),
    Stage("short", 150, 16, (96, 128), questions=3),
    Stage("medium", 150, 8, (256, 384), questions=8),
    Stage("1k", 300, 3, (1024,)),
    Stage("2k", 100, 2, (1536, 2048), questions=24),
    Stage("4k", 120, 1, (3072, 4096, 5120), questions=24),
)


@dataclass
class Record:
    """What the model card tells about a run."""

    seed: int
    threads: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    complete: bool = False


def config() -> LlamaConfig:
    """Four layers, four query heads and two KV heads of 64."""
    tokenizer = build_tokenizer()
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="sdpa",
    )


@torch.no_grad()
def initialise(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Random weights with a rough induction circuit in the first two layers.

    Every embedding is a random unit vector plus one common unit vector. Layer 0: queries and keys read the common vector
    only, so RoPE alone decides, and heads 0, 1, 2 look 1, 2, 3 words back and copy part of that word into a subspace of
    their own. Layer 1: the current (previous) word is matched with the words that stand 1 or 2 before each key, and the
    matched word is copied. The later layers and all MLPs start at zero output.
    """
    hidden, dim = model.config.hidden_size, model.config.head_dim
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
    rotation = model.config.rope_parameters["rope_theta"] ** (-torch.arange(dim // 2) / (dim // 2))[:fast]
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
    """Random words, repeated with a random period. Returns: ids and labels [B, length]; labels count the repetitions."""
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
    """Texts followed by questions and answers. Returns: ids and labels [B, T], padded right; labels count the answers."""
    rows = []
    for i in range(stage.batch):
        task = stage.tasks[(seed + i) % len(stage.tasks)]
        sample = generate(task, length, seed + i, min(stage.questions, max_questions(task, length)))
        ids = tokenizer(sample.context).input_ids
        labels = [IGNORE] * len(ids)
        for question, answer in zip(sample.questions, sample.answers):
            asked = tokenizer(question, add_special_tokens=False).input_ids
            told = tokenizer(answer, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
            ids += asked + told
            labels += [IGNORE] * len(asked) + told
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Cross entropy of the labelled words, plus `REST_WEIGHT` times that of the other words, and the labelled part alone."""
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
    """How many questions greedy decoding answers exactly, of how many, on held-out seeds.

    The cache of each text is shared by its questions, which do not see each other. Answers are teacher-forced: all words
    being the argmax is the same as greedy decoding giving the answer.
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


def train(out: Path, seed: int, threads: int, minutes: float, console: Console) -> Record:
    """Run `STAGES` and leave the model in `out`, also after every stage, so that an interrupted run leaves one too.

    Args: minutes: stop early after this much wall time; the same seed and threads give the same model otherwise.
    """
    record = Record(seed, threads)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokenizer = build_tokenizer()
    model = LlamaForCausalLM(config())
    initialise(model, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    text_seed = HELD_OUT + seed * 10**9
    total = sum(stage.steps for stage in STAGES)
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=total, note="")
        for stage in STAGES:
            model.train()
            recent = 0.0
            for step in range(stage.steps):
                if time.monotonic() - began > 60 * minutes:
                    console.print(f"stopped after {minutes:g} minutes, in stage {stage.name}")
                    save(model, tokenizer, out)
                    return record
                length = rng.choice(stage.lengths)
                if stage.tasks:
                    ids, labels = text_batch(stage, length, text_seed, tokenizer)
                    text_seed += stage.batch
                else:
                    ids, labels = repeated_batch(stage, length, rng)
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate(record.steps, total)
                loss, answers = loss_of(model, ids, labels)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                recent = answers if step == 0 else 0.9 * recent + 0.1 * answers
                record.steps += 1
                record.tokens += ids.numel()
                record.seconds = time.monotonic() - began
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
            save(model, tokenizer, out)
    record.seconds = time.monotonic() - began
    record.complete = True
    return record


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


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, card: str | None = None) -> None:
    """Write the model as bf16, the tokenizer and the card, then swap the directory in, so that readers never see half."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    fresh.chmod(0o755)  # mkdtemp makes it private
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
    if card is not None:
        (fresh / "README.md").write_text(card)
    if out.exists():
        old = fresh.with_suffix(".old")
        os.rename(out, old)
        os.rename(fresh, out)
        shutil.rmtree(old)
    else:
        os.rename(fresh, out)


def card_of(record: Record, table: dict[tuple[str, int], tuple[int, int]], model: LlamaForCausalLM) -> str:
    """The model card, from measured numbers."""
    parameters = sum(weight.numel() for weight in model.parameters())
    cfg = model.config
    stages = [
        f"| {stage.name} | {stage.steps} | {stage.batch} | {', '.join(map(str, stage.lengths))} | "
        f"{', '.join(stage.tasks) or 'random words, repeated'} | {stage.questions if stage.tasks else ''} |"
        for stage in STAGES
    ]
    rows = []
    for task in TASKS:
        cells = [f"{right / total:.1%} ({right}/{total})" for right, total in (table[task, n] for n in EVAL_LENGTHS)]
        rows.append(f"| {task} | {' | '.join(cells)} |")
    longest = max(max(stage.lengths) for stage in STAGES)
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# fastkv demo model

A small Llama that answers questions about facts scattered in long texts, so that cache compression can be seen and
tested on trained weights without a download. It knows {cfg.vocab_size} words and nothing of the world.

**Architecture.** `LlamaForCausalLM`, {cfg.num_hidden_layers} layers, width {cfg.hidden_size}, MLP {cfg.intermediate_size},
{cfg.num_attention_heads} query heads and {cfg.num_key_value_heads} KV heads of {cfg.head_dim}, RoPE base
{cfg.rope_parameters["rope_theta"]:,.0f}, tied embeddings, {parameters:,} parameters stored as bf16.

**Data.** Generated by `fastkv/demo/tasks.py`, one token per word: grammatical filler with facts at uniformly random places
and questions at the end; 24 facts per 1024 tokens, at most 48 (`hops`: 12 chains of two facts, at most 24).
`facts` asks for the three numbers of a two-word key, `pairs` for those of two keys, `hops` for a name and then for the
three numbers of that name. The question ends with the beginning of its answer.

**Training.** `python -m fastkv.demo.train --seed {record.seed} --threads {record.threads}`: {record.steps:,} steps, {record.tokens:,} tokens,
{record.seconds / 60:.1f} minutes on {record.threads} CPU threads{"" if record.complete else " (stopped early)"}; torch {torch.__version__}, transformers {transformers.__version__},
Python {platform.python_version()}. AdamW, learning rate {LEARNING_RATE:g} with {WARMUP_STEPS} steps of warm-up and a cosine, bf16 autocast, cross entropy of
the answers plus {REST_WEIGHT:g} times that of all other words. The weights do not start fully random: `initialise` puts a rough
induction circuit into the first two layers.

| stage | steps | batch | lengths | tasks | questions per text |
|---|---|---|---|---|---|
{chr(10).join(stages)}

**Accuracy.** Full cache, the stored bf16 weights computed in fp32, text seeds that training cannot reach; an answer counts if
greedy decoding gives every word of it. Training saw texts of up to {longest} tokens and their questions.

| task | {' | '.join(f"{n} tokens" for n in EVAL_LENGTHS)} |
|---|{'---|' * len(EVAL_LENGTHS)}
{chr(10).join(rows)}

Measure again with `python -m fastkv.demo.train --evaluate`.
"""


def main() -> None:
    """Train, measure and write the card, or with `--evaluate` only measure."""
    parser = argparse.ArgumentParser(prog="python -m fastkv.demo.train", description="Train the bundled demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="model directory to write or measure (default: bundled)")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop training after this many minutes (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and texts (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--texts", type=int, default=25, help="texts per cell of the accuracy table (default: 25)")
    parser.add_argument("--questions", type=int, default=12, help="questions per text, at most (default: 12)")
    parser.add_argument("--evaluate", action="store_true", help="only measure the model in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    record = None if args.evaluate else train(args.out, args.seed, args.threads, args.minutes, console)
    model, tokenizer = load(directory=args.out)
    table = evaluate(model, tokenizer, args.texts, args.questions, console)
    if record is not None:
        save(model, tokenizer, args.out, card_of(record, table, model))
        console.print(f"written to {args.out}")


if __name__ == "__main__":
    main()
