"""Which heads of the bundled model retrieve: the pattern file that DuoAttention needs.

    python -m tools.demo_model.heads --out fastkv/demo/model/full_attention_heads.tsv

DuoAttention learns a gate for each KV head. Here the number of a head is the attention that the words of a question and
its answer pay to tokens that a streaming head would not hold, mean over the group, relative to the head with most.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastkv.demo import PATTERN, load
from fastkv.demo.measure import make_questions
from fastkv.demo.tasks import TASKS

SINKS, RECENT = 4, 64


@torch.no_grad()
def retrieval(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, samples: int) -> Tensor:
    """[layers, Hkv] in [0, 1], measured on `samples` texts of `length` tokens of every task; eager attention only."""
    heads = model.config.num_key_value_heads
    total = torch.zeros(model.config.num_hidden_layers, heads)
    for task in TASKS:
        asked = make_questions(tokenizer, task, length, samples, seed=10_000)
        words = torch.cat([asked.prompts, asked.answers], 1)
        num = asked.question + asked.answers.shape[1]
        index = torch.arange(words.shape[1])
        far = (index >= SINKS) & (index <= index[-num:, None] - RECENT)
        for layer, attention in enumerate(model(words, output_attentions=True).attentions):
            mass = (attention[:, :, -num:] * far).sum(-1).mean((0, 2))
            total[layer] += mass.view(heads, -1).mean(-1)
    return total / total.max()


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.heads", description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=512, help="tokens of a text (default: 512)")
    parser.add_argument("--samples", type=int, default=8, help="texts of each task (default: 8)")
    parser.add_argument("--out", type=Path, default=PATTERN, help="file to write (default: where the model is)")
    options = parser.parse_args()
    model, tokenizer = load("eager")
    pattern = retrieval(model, tokenizer, options.length, options.samples)
    lines = ["\t".join(f"{number:.3f}" for number in row) for row in pattern.tolist()]
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), f"written to {options.out}", sep="\n")


if __name__ == "__main__":
    main()
