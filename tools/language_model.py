"""Train a small model of real language, on text that every machine has: the source of Python's standard library.

    python -m tools.language_model --minutes 60       # two threads; writes perf/language_model

The bundled model finds facts in random words: a few outliers among keys, and nothing between them. Source code and the
prose in its comments and docstrings are what language models read: attention to syntax, names and topics, graded. So
this model says what a policy does to perplexity and to the next token's distribution, and nothing about retrieval.

Files are held out by a hash of their names, so that no version of Python trains on what another one is judged by. Some
of their text lies beside the model. Tokens are byte pairs. Context grows from SHORT to LONG tokens in the last part of
training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent.parent / "perf" / "language_model"
LEFT_OUT = {"test", "tests", "idle_test", "lib2to3", "__pycache__", "site-packages", "idlelib", "ensurepip"}
VOCABULARY, SHORT, LONG, BATCH = 2048, 512, 2048, 4096  # tokens: in all, of a row, of a row at last, of a step
END = "<end>"
SAMPLE = "held_out.txt"  # the beginnings of some held-out files
SAMPLE_FILES, SAMPLE_CHARACTERS = 8, 6000
PEAK, LAST_SHARE, WARMUP, GROWN = 3e-3, 0.05, 0.02, 0.7  # learning rate; shares of it and of the time


@dataclass
class Record:
    """How a model was made and what it can do: its card."""

    seed: int
    threads: int
    python: str
    files: int
    held_out_files: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # nats a token of held-out text, in rows of LONG tokens
    bits_per_byte: float = 0.0
    sample_loss: float = 0.0  # nats a token of the text in SAMPLE


def corpus() -> tuple[list[str], list[str]]:
    """Source files of this Python's standard library, in order of their names: for training, and held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[str], list[str]] = ([], [])
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not LEFT_OUT.intersection(name.parts):
            held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < 26  # a tenth
            parts[held_out].append(file.read_text(encoding="utf-8", errors="ignore"))
    return parts


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of these texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END, pad_token=END)


def encoded(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts one after another, each between END and END, as [N] ids."""
    ids = [[0, *tokenizer(text, add_special_tokens=False).input_ids] for text in texts]
    return torch.tensor([token for text in ids for token in text])


def untrained(seed: int) -> LlamaForCausalLM:
    """3.2 M weights: four layers, four query heads and two KV heads of 64."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=672, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=LONG, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=0, eos_token_id=0,
            pad_token_id=0,
        )
    )  # fmt: skip


def rows(ids: Tensor, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Stretches of length + 1 tokens at random places, as many as make a step, for ever."""
    while True:
        starts = torch.randint(len(ids) - length - 1, (BATCH // length,), generator=generator)
        yield torch.stack([ids[start : start + length + 1] for start in starts.tolist()])


def stretches(ids: Tensor, number: int, size: int, seed: int) -> Tensor:
    """[number, size] of ids [N], at places that do not overlap."""
    places = random.Random(seed).sample(range(len(ids) // size), number)
    return torch.stack([ids[place * size : (place + 1) * size] for place in places])


def held_out_digest() -> str:
    """First 16 hexadecimal digits of the SHA-256 of the held-out text, which differs between versions of Python."""
    return hashlib.sha256("".join(corpus()[1]).encode()).hexdigest()[:16]


def loss_of(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Cross entropy of the tokens after the first, nats a token."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(model: LlamaForCausalLM, ids: Tensor, record: Record, minutes: float, console: Console) -> None:
    """So many minutes of AdamW under one warm-up and cosine, as the threads count them: waiting is not training."""

    def minutes_spent() -> float:
        return (time.process_time() - began) / (60 * record.threads)

    generator = torch.Generator().manual_seed(record.seed)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95),
        fused=True,
    )  # fmt: skip
    short, long = rows(ids, SHORT, generator), rows(ids, LONG, generator)
    model.train()
    began, recent = time.process_time(), math.log(VOCABULARY)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=1.0, note="")
        while (share := minutes_spent() / minutes) < 1:
            cosine = LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * share))
            for group in optimizer.param_groups:
                group["lr"] = PEAK * min(1.0, share / WARMUP + 0.01) * cosine
            batch = next(short if share < GROWN else long)
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent = 0.98 * recent + 0.02 * loss.item()
            record.steps += 1
            record.tokens += batch[:, 1:].numel()
            note = f"{record.tokens:,} tokens, loss {recent:.3f}"
            progress.update(bar, completed=share, note=note)
            if record.steps % 100 == 0:
                console.print(f"step {record.steps}, {note}, {60 * minutes_spent():.0f} s")
    record.seconds = round(60 * minutes_spent(), 1)


def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], record: Record) -> None:
    """Loss and bits per byte of held-out texts, and the loss of their sample."""
    record.loss, tokens = held_out_loss(model, tokenizer, texts)
    record.bits_per_byte = record.loss / math.log(2) * tokens / sum(len(text.encode()) for text in texts)
    record.sample_loss, _ = held_out_loss(model, tokenizer, [sample_of(texts)])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[float, int]:
    """Nats a token in rows of LONG tokens that do not overlap, and the number of all tokens."""
    ids = encoded(tokenizer, texts)
    whole = ids[: len(ids) // LONG * LONG].view(-1, LONG)
    model.eval()
    losses = [loss_of(model, part).item() * len(part) for part in whole.split(4)]
    return sum(losses) / len(whole), len(ids)


def sample_of(texts: list[str]) -> str:
    """The beginnings of some long texts."""
    long = [text for text in texts if len(text) > SAMPLE_CHARACTERS]
    chosen = long[:: max(1, len(long) // SAMPLE_FILES)][:SAMPLE_FILES]
    return "".join(text[:SAMPLE_CHARACTERS] for text in chosen)


def card_of(model: LlamaForCausalLM, record: Record) -> str:
    """The model card, of measured numbers."""
    weights = sum(weight.numel() for weight in model.parameters()) / 1e6
    config, spent = model.config, f"{record.seconds / 60:.0f} minutes of {record.threads} threads"
    return f"""# A small model of Python's own standard library

A Llama of {weights:.1f} M weights: {config.num_hidden_layers} layers, {config.num_attention_heads} query heads and
{config.num_key_value_heads} KV heads of {config.head_dim}, RoPE, {VOCABULARY} byte-pair tokens, context {LONG}.
Written by `python -m tools.language_model` with seed {record.seed}: {record.tokens / 1e6:.1f} M tokens in {spent}.

Trained on {record.files} files of the standard library of Python {record.python}, source and docstrings;
{record.held_out_files} others are held out. There it needs {record.loss:.3f} nats a token or
{record.bits_per_byte:.3f} bits a byte, in rows of {LONG} tokens; {record.sample_loss:.3f} nats a token of
`{SAMPLE}`, the beginnings of {SAMPLE_FILES} of these files, which are under Python's own license.

    fastkv fidelity --model perf/language_model --text perf/language_model/{SAMPLE}

It measures what a cache does to perplexity and to the distribution of the next token. It was not trained to find facts
in its context and says nothing about retrieval; the bundled model does. `queries.safetensors`, which TriAttention
needs, is what `fastkv calibrate queries` found in some of the training files; other weights need it again.
"""


def write_card(folder: Path, model: LlamaForCausalLM, record: Record, held_out: list[str]) -> None:
    """What the model is, beside its weights: the record, the card made of it, and some held-out text."""
    (folder / "training.json").write_text(json.dumps(asdict(record), indent=2) + "\n")
    (folder / "README.md").write_text(card_of(model, record))
    (folder / SAMPLE).write_text(sample_of(held_out), encoding="utf-8")


def main() -> None:
    """Train, measure, and write the model with its card."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.language_model",
        description="Train a small language model on the source of Python's standard library.",
        epilog="example: python -m tools.language_model --out build/language_model --minutes 60",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="directory to write (default: perf/language_model)")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training, each thread's own (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    texts, held_out = corpus()
    tokenizer = tokenizer_of(texts)
    ids = encoded(tokenizer, texts)
    console.print(f"{len(texts)} files, {len(ids):,} tokens; {len(held_out)} files held out")
    record = Record(args.seed, args.threads, platform.python_version(), len(texts), len(held_out))
    model = untrained(args.seed)
    train(model, ids, record, args.minutes, console)
    model.bfloat16().float()
    measure(model, tokenizer, held_out, record)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    write_card(args.out, model, record, held_out)
    console.print(f"{record.loss:.3f} nats a token, {record.bits_per_byte:.3f} bits a byte; written to {args.out}")


if __name__ == "__main__":
    main()
