"""Measure the bundled model, and write it down: weights, tokenizer and a model card made of measured numbers."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastkv.demo.tasks import TASKS, generate, max_questions

from .circuit import HEAD_DIM, ROPE_THETA
from .training import ROUNDS, Record

EVAL_LENGTHS = (1024, 2048, 4096, 8192)


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

**Training.** `python -m tools.demo_model --seed {record.seed} --threads {record.threads}`:
{record.steps:,} steps, {record.tokens:,} tokens, {record.seconds / 60:.1f} minutes for the steps on {record.threads}
CPU threads{"" if record.rounds == len(ROUNDS) else " (stopped early)"};
torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}.
AdamW, learning rate {rates}, with a short warm-up and a cosine in
each round, bf16 autocast; cross entropy of the answers plus 0.1 times that of all other words.
The weights do not start fully random: `initialise` puts a rough induction circuit into the first two layers.

| round: stage | steps | batch | lengths | tasks | questions per text, at most |
|---|---|---|---|---|---|
{newline.join(table_of_stages)}

**Accuracy.** Full cache, the stored bf16 weights computed in fp32, text seeds that training cannot reach. An answer
counts if greedy decoding gives every word of it. Training saw texts of up to {longest} tokens.

| task | {" | ".join(f"{n} tokens" for n in EVAL_LENGTHS)} |
|---|{"---|" * len(EVAL_LENGTHS)}
{newline.join(rows)}

Measure again with `python -m tools.demo_model --evaluate`.

**Fitted to it.** `vector.safetensors` (`fastkv calibrate vector`), `queries.safetensors` (`fastkv calibrate queries`),
`context.json` (`fastkv calibrate context`) and `full_attention_heads.tsv` (`python -m tools.demo_model.heads`). Other
weights need them again.
"""
