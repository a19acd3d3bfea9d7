"""The bundled model: a small trained Llama that answers questions about facts scattered in long texts.

    from fastkv.demo import load
    from fastkv.demo.tasks import generate

    model, tokenizer = load()
    sample = generate("facts", length=1024, seed=0)
    inputs = tokenizer(f"{sample.context} {sample.questions[0]}", return_tensors="pt")

`tasks.py` writes the texts, `measure.py` says what a cache does to the answers, `model/README.md` is the model card.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from .. import policies

MODEL_DIR = Path(__file__).parent / "model"
PATTERN = MODEL_DIR / "full_attention_heads.tsv"  # which heads DuoAttention keeps whole


def load(
    attn_implementation: str = "sdpa", dtype: torch.dtype | None = None, directory: Path = MODEL_DIR
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The bundled model in eval mode on the CPU, and its tokenizer; reads local files only.

    Args: attn_implementation: as in `from_pretrained`; dtype: of the weights, fp32 by default; directory: of the model.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=attn_implementation, dtype=dtype or torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return cast(LlamaForCausalLM, model.eval()), cast(PreTrainedTokenizerFast, tokenizer)


def policy_of(name: str) -> policies.Policy:
    """The policy with its defaults; DuoAttention with the pattern of the bundled model."""
    return policies.get(name, **({"pattern": str(PATTERN)} if name == "duoattention" else {}))
