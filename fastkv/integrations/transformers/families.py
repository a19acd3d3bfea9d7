"""What is known of model types by name: which are tested, and which are refused and why.

Everything else about a model is found by behaviour (`modules`). A type on neither list is accepted if it behaves.
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from packaging.version import Version
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Attention implementations that compute what models mean; and those of the hub that `is_hub_flash` knows.
BASES = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")

FOUND = Path(__file__).with_suffix(".json")  # what `python -m tests.families --write` found
_found = json.loads(FOUND.read_text(encoding="utf-8"))
TESTED_WITH: str = _found["transformers"]
TESTED: dict[str, str] = {name: what for what, names in _found["types"].items() for name in names.split()}

INDEXED = "it attends to tokens that an indexer picks from the whole past"
REFUSED = {
    "axk2": INDEXED,
    "bloom": "it biases attention by distance (ALiBi), which evicted tokens no longer have",
    "codegen": "its attention does not go through transformers' interface",
    "deepseek_v32": INDEXED,
    "deepseek_v4": "it compresses its own cache",
    "diffllama": "it attends twice to the same keys, with halves of the values",
    "dots3_note": INDEXED,
    "falcon": "its attention does not go through transformers' interface",
    "glm5_next": INDEXED,
    "glm_moe_dsa": INDEXED,
    "gpt_bigcode": "it caches keys and values in one tensor",
    "gptj": "its attention does not go through transformers' interface",
    "hy_v4": INDEXED,
    "jetmoe": "each of its experts attends with queries of its own",
    "minimax": "its linear attention keeps a cache of its own",
    "mistral_large4": INDEXED,
    "mpt": "it biases attention by distance (ALiBi), which evicted tokens no longer have",
    "opt": "its positions follow from the attention mask, which is not the sequence's when it decodes",
    "zamba": "one attention module serves several layers",
}

# transformers itself goes on from the state of these layers for single tokens only.
WHOLE_ONLY = {
    "bamba": "its linear attention begins anew at every block",
    "jamba": "its linear attention begins anew at every block",
}


def is_hub_flash(base: str) -> bool:
    """Whether an attention implementation is a kernel of the hub with the interface of flash-attn, as
    `kernels-community/flash-attn2`: transformers then calls it, and masks for it, as it does for flash_attention_2."""
    return "/" in base and ALL_ATTENTION_FUNCTIONS.get(base) is flash_attention_forward


def is_base(base: str) -> bool:
    """Whether patched layers may fall back on an attention implementation, and read a first prompt with it."""
    return base in BASES or is_hub_flash(base)


def is_flash(base: str) -> bool:
    """Whether an attention implementation is one of flash-attn, which takes 2-D masks only."""
    return base.startswith("flash_attention_") or is_hub_flash(base)


def refusal(types: list[str]) -> str | None:
    """Why a model of these types, its own and its language model's, cannot be patched; None if nothing is known."""
    return next((f"{name} is not supported: {REFUSED[name]}" for name in types if name in REFUSED), None)


def whole_only(types: list[str]) -> str | None:
    """Why a model of these types cannot read a prompt in blocks; None if nothing is known."""
    return next((f"{name} reads prompts whole only: {WHOLE_ONLY[name]}" for name in types if name in WHOLE_ONLY), None)


def is_tested_here(model_type: str) -> bool:
    """Whether a type is tested, with the transformers that is installed: one that is older may do something else."""
    return model_type in TESTED and Version(transformers.__version__).release[:2] >= Version(TESTED_WITH).release[:2]
