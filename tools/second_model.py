"""A second trained model for the verdict: a small Qwen3 with normed queries and keys and heads of 32.

    python -m tools.second_model                      # about 10 minutes of one core; `verdict` calls it when needed

The bundled model's texts, circuit and loss, with another architecture, width and head_dim. Queries and keys are normed,
so weights of the norms stand for the sharpness that the circuit has in its projections. The weights are not part of the
repository; the verdict records their SHA-256, which one number of threads and one build of torch repeat.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import Qwen3Config, Qwen3ForCausalLM

from fastkv.demo.tasks import VOCABULARY

from .demo_model.circuit import ROPE_THETA, build_tokenizer, initialise
from .demo_model.training import HELD_OUT, Stage, steps

FOLDER = Path(__file__).parent.parent / "build" / "second_model"
LEARNING_RATE = 2e-3
STAGES = (
    Stage("repeats", 80, 16, (64, 96), tasks=()),
    Stage("short", 200, 16, (96, 128), questions=3),
    Stage("medium", 170, 8, (256, 384), questions=8),
    Stage("1k", 110, 3, (1024,)),
)
SHARPNESS = (7.0, 2.4)  # of the norms' weights in the two layers of the circuit
REST = 1.5  # in the later layers


def untrained(seed: int) -> Qwen3ForCausalLM:
    """Four layers, four query heads and two KV heads of 32, with the rough induction circuit of the bundled model."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    initialise(model, torch.Generator().manual_seed(seed))
    for index, layer in enumerate(model.model.layers):
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.constant_(norm.weight, SHARPNESS[index] if index < len(SHARPNESS) else REST)
    return model


def train(out: Path, seed: int) -> None:
    """Run `STAGES` under one cosine and leave weights and tokenizer in `out`."""
    model, tokenizer, rng = untrained(seed), build_tokenizer(), random.Random(seed)
    text_seed = HELD_OUT + seed * 10**9 + STAGES[0].steps * STAGES[0].batch
    started, console = time.monotonic(), Console()
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=sum(stage.steps for stage in STAGES))
        for step in steps(model, tokenizer, STAGES, LEARNING_RATE, rng, text_seed, fused=False):
            progress.update(bar, advance=1, description=step.stage.name)
            if step.number % 25 == 0 or step.last:
                seconds = time.monotonic() - started
                console.print(
                    f"{step.stage.name} {step.number}/{step.stage.steps}: {step.loss:.3f} after {seconds:.0f} s"
                )
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.eval().save_pretrained(out)


def main(words: list[str] | None = None) -> None:
    """Train it."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.second_model",
        description=__doc__.split("\n")[0],
        epilog="example: python -m tools.second_model --out build/second_model",
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: build/second_model")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and texts (default: 0)")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    train(options.out, options.seed)


if __name__ == "__main__":
    main()
