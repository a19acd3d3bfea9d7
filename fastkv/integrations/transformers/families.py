"""What is known of model types by name: which are tested, and which are refused and why.

Everything else about a model is found by behaviour (`modules`). A type on neither list is accepted if it behaves.
"""

from __future__ import annotations

BASES = ("eager", "sdpa", "flash_attention_2")  # attention implementations that compute what models mean

# What `python -m tests.families --write` found:
TESTED = {
    "llama": "all features",
    # Version 0.1 slides a window in every layer and is refused; from 0.2 on every layer attends to everything.
    "mistral": "all features",
    "qwen2": "all features",
    "qwen3": "all features",
    "qwen3_moe": "all features",
    "gemma2": "all features, with eager attention or flash_attention_2: sdpa ignores its soft-cap",
    "gemma3_text": "all features",
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu"),
        "latent attention; not with the Triton kernels, correction='vector' or policy 'criticalkv'",
    ),
    **dict.fromkeys(
        ("bailing_hybrid", "kimi_linear"),
        "latent attention beside linear attention; not with the Triton kernels, 'vector' or 'criticalkv'",
    ),
    "gpt_oss": "all features, with eager attention: sdpa ignores its sinks",
}
# Until here.

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
    "inkling": "it biases attention by positions, which evicted tokens no longer have",
    "jetmoe": "each of its experts attends with queries of its own",
    "minimax": "its linear attention keeps a cache of its own",
    "mistral_large4": INDEXED,
    "mpt": "it biases attention by distance (ALiBi), which evicted tokens no longer have",
    "zamba": "one attention module serves several layers",
}

# transformers itself goes on from the state of these layers for single tokens only.
WHOLE_ONLY = {
    "bamba": "its linear attention begins anew at every block",
    "jamba": "its linear attention begins anew at every block",
}


def refusal(types: list[str]) -> str | None:
    """Why a model of these types, its own and its language model's, cannot be patched; None if nothing is known."""
    return next((f"{name} is not supported: {REFUSED[name]}" for name in types if name in REFUSED), None)


def whole_only(types: list[str]) -> str | None:
    """Why a model of these types cannot read a prompt in blocks; None if nothing is known."""
    return next((f"{name} reads prompts whole only: {WHOLE_ONLY[name]}" for name in types if name in WHOLE_ONLY), None)


def is_tested(types: list[str]) -> bool:
    """Whether a model of these types, its own and its language model's, is on the list of what is tested."""
    return any(name in TESTED for name in types)
