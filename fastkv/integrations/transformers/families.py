"""What is known of model types by name: which are tested, and which are refused and why.

Everything else about a model is found by behaviour (`modules`). A type on neither list is accepted if it behaves.
"""

from __future__ import annotations

BASES = ("eager", "sdpa", "flash_attention_2")  # attention implementations that compute what models mean

# What `python -m tests.families --write` found:
TESTED = {
    "afmoe": "all features but kernels",
    "apertus": "all features but kernels",
    "arcee": "all features but kernels",
    "aria": "all features but images, kernels",
    "aria_text": "all features but kernels",
    "aya_vision": "all features but images, kernels",
    "bamba": "all features but blocks, kernels",
    "beam": "all features but kernels",
    "biogpt": "all features but kernels",
    "bitnet": "all features but kernels",
    "cohere": "all features but kernels",
    "cohere2": "all features",
    "cohere2_moe": "all features but kernels",
    "cohere2_vision": "all features but images, kernels",
    "ctrl": "all features but compactor, kernels",
    "cwm": "all features but kernels",
    "deepseek_vl": "all features but images, kernels",
    "deepseek_vl_hybrid": "all features but images, kernels",
    "dots1": "all features but kernels",
    "ernie4_5": "all features",
    "ernie4_5_moe": "all features but kernels",
    "exaone4": "all features",
    "exaone_moe": "all features but kernels",
    "falcon_h1": "all features",
    "flex_olmo": "all features but kernels",
    "flint": "all features but sdpa, kernels",
    "fuyu": "all features but images, kernels",
    "gemma": "all features",
    "gemma2": "all features but sdpa",
    "gemma3": "all features",
    "gemma3_text": "all features",
    "gemma3n_text": "all features",
    "gemma4_text": "all features",
    "gemma4_unified_text": "all features but kernels",
    "glm": "all features",
    "glm4": "all features",
    "glm4_moe": "all features",
    "gpt_oss": "all features but sdpa",
    "granite": "all features",
    "granitemoehybrid": "all features",
    "hunyuan_v1_dense": "all features",
    "hunyuan_v1_moe": "all features",
    "lfm2": "all features",
    "llama": "all features",
    "llama4": "all features but static_steps",
    "llama4_text": "all features but static_steps",
    "minimax_m2": "all features",
    "ministral": "all features",
    "ministral3": "all features",
    "mistral": "all features but windows-only",
    "mistral3": "all features",
    "mixtral": "all features",
    "mllama": "all features but images",
    "nemotron_h": "all features",
    "olmo2": "all features",
    "olmo3": "all features",
    "phi": "all features",
    "phi3": "all features",
    "phi4_multimodal": "all features",
    "phimoe": "all features",
    "qwen2": "all features",
    "qwen2_moe": "all features",
    "qwen3": "all features",
    "qwen3_5_moe_text": "all features",
    "qwen3_5_text": "all features",
    "qwen3_moe": "all features",
    "qwen3_next": "all features",
    "seed_oss": "all features",
    "smollm3": "all features",
    "starcoder2": "all features",
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
    "opt": "its positions follow from the attention mask, which is not the sequence's when it decodes",
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
