"""What is known of model types by name: which are tested, and which are refused and why.

Everything else about a model is found by behaviour (`modules`). A type on neither list is accepted if it behaves.
"""

from __future__ import annotations

import transformers
from packaging.version import Version
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Attention implementations that compute what models mean; and those of the hub that `is_hub_flash` knows.
BASES = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")

# What `python -m tests.families --write` found:
TESTED_WITH = "5.23.0"  # of transformers
TESTED = {
    "afmoe": "all features",
    "apertus": "all features",
    "arcee": "all features",
    "aria": "all features but images",
    "aria_text": "all features",
    "axk1": "all features but criticalkv, kernels",
    "aya_vision": "all features but images",
    "bailing_hybrid": "all features but criticalkv, kernels",
    "bamba": "all features but blocks",
    "beam": "all features",
    "biogpt": "all features",
    "bitnet": "all features",
    "cohere": "all features",
    "cohere2": "all features",
    "cohere2_moe": "all features",
    "cohere2_vision": "all features but images",
    "cosmos3_edge": "all features but images",
    "cosmos3_omni": "all features but images",
    "ctrl": "all features but compactor",
    "cwm": "all features",
    "deepseek_v2": "all features but criticalkv, kernels",
    "deepseek_v3": "all features but criticalkv, kernels",
    "deepseek_vl": "all features but images",
    "deepseek_vl_hybrid": "all features but images",
    "dots1": "all features",
    "ernie4_5": "all features",
    "ernie4_5_moe": "all features",
    "ernie4_5_vl_moe": "all features but compactor, images",
    "exaone4": "all features",
    "exaone4_5": "all features but images",
    "exaone_moe": "all features",
    "falcon_h1": "all features",
    "flex_olmo": "all features",
    "flint": "all features but sdpa",
    "fuyu": "all features but images",
    "gemma": "all features",
    "gemma2": "all features but sdpa",
    "gemma3": "all features",
    "gemma3_text": "all features",
    "gemma3n_text": "all features",
    "gemma4": "all features but images, sound",
    "gemma4_text": "all features",
    "gemma4_unified": "all features but images, sound",
    "gemma4_unified_text": "all features",
    "glm": "all features",
    "glm4": "all features",
    "glm46v": "all features but images in a second turn",
    "glm4_moe": "all features",
    "glm4_moe_lite": "all features but criticalkv, kernels",
    "glm4v": "all features but images in a second turn",
    "glm4v_moe": "all features but images in a second turn",
    "glm_ocr": "all features but images in a second turn",
    "glmga": "all features but images in a second turn",
    "got_ocr2": "all features but images, sdpa",
    "gpt-sw3": "all features",
    "gpt2": "all features",
    "gpt_neox": "all features",
    "gpt_oss": "all features but sdpa",
    "granite": "all features",
    "granite_docling": "all features but images",
    "granite_swa": "all features but sdpa",
    "granitemoe": "all features",
    "granitemoe_swa": "all features but sdpa",
    "granitemoehybrid": "all features",
    "granitemoeshared": "all features",
    "helium": "all features",
    "hunyuan_v1_dense": "all features",
    "hunyuan_v1_moe": "all features",
    "hunyuan_vl": "all features but images",
    "hy_v3": "all features",
    "hyperclovax": "all features",
    "hyperclovax_vision_v2": "all features but images",
    "idefics3": "all features but images",
    "internlm3": "all features",
    "internvl": "all features but images",
    "iquestcoder": "all features",
    "jais2": "all features",
    "jamba": "all features but blocks",
    "kimi_k25": "all features but criticalkv, kernels, images",
    "kimi_linear": "all features but criticalkv, kernels",
    "kolibri1": "all features",
    "laguna": "all features but kernels",
    "lfm2": "all features",
    "lfm2_moe": "all features",
    "lfm2_vl": "all features but images",
    "lfm3": "all features",
    "lfm3_vl": "all features but images",
    "lighton_ocr": "all features but images",
    "llama": "all features",
    "llama4": "all features but static_steps",
    "llama4_text": "all features but static_steps",
    "llava": "all features",
    "llava_next": "all features but images",
    "llava_next_video": "all features but images",
    "llava_onevision": "all features but images",
    "longcat_flash": "all features but criticalkv, kernels",
    "mellum": "all features",
    "mimo_v2_flash": "all features but sdpa",
    "minicpm3": "all features but criticalkv, kernels",
    "minicpm_ocr": "all features but images",
    "minicpmv4_6": "all features but images",
    "minicpmv4_7": "all features but images",
    "minimax_m2": "all features",
    "ministral": "all features",
    "ministral3": "all features",
    "mistral": "all features but windows-only",
    "mistral3": "all features",
    "mixtral": "all features",
    "mllama": "all features but images",
    "moss_transcribe_diarize": "all features but sound",
    "muse_glimmer": "all features but images",
    "nanochat": "all features but compactor",
    "nemotron": "all features",
    "nemotron_h": "all features",
    "olmo": "all features",
    "olmo2": "all features",
    "olmo3": "all features",
    "olmo_hybrid": "all features",
    "olmoe": "all features",
    "ovis2": "all features but images",
    "paddleocr_vl": "all features but images",
    "persimmon": "all features",
    "phi": "all features",
    "phi3": "all features",
    "phi4_multimodal": "all features but images, sound",
    "phimoe": "all features",
    "pp_chart2table": "all features but images, sdpa",
    "qianfan_ocr": "all features but images",
    "qwen2": "all features",
    "qwen2_5_omni_thinker": "all features but turns, compactor, images, sound",
    "qwen2_5_vl": "all features but images in a second turn",
    "qwen2_moe": "all features",
    "qwen2_vl": "all features but images in a second turn",
    "qwen3": "all features",
    "qwen3_5": "all features but images in a second turn",
    "qwen3_5_moe": "all features but images in a second turn",
    "qwen3_5_moe_text": "all features",
    "qwen3_5_text": "all features",
    "qwen3_moe": "all features",
    "qwen3_next": "all features",
    "qwen3_omni_moe_thinker": "all features but turns, compactor, images, sound",
    "qwen3_vl": "all features but images in a second turn",
    "qwen3_vl_moe": "all features but images in a second turn",
    "seed_oss": "all features",
    "shieldgemma2": "all features but images",
    "smollm3": "all features",
    "smolvlm": "all features but images",
    "solar_open": "all features",
    "stablelm": "all features",
    "starcoder2": "all features",
    "step3p7": "all features but images",
    "vaultgemma": "all features but sdpa",
    "video_llama_3": "all features but images",
    "video_llava": "all features but images",
    "vipllava": "all features but images",
    "youtu": "all features but criticalkv, kernels",
    "zaya": "all features",
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


def is_tested(model_type: str) -> bool:
    """Whether models of a type, whatever that of their language model, are on the list of what is tested."""
    return model_type in TESTED


def is_tested_here(model_type: str) -> bool:
    """Whether it is tested with the transformers that is installed: one that is older may do something else."""
    return is_tested(model_type) and Version(transformers.__version__).release[:2] >= Version(TESTED_WITH).release[:2]
