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
FOUND = {
    "all features": """afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe cwm dots1
        ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo gemma gemma3 gemma3_text gemma3n_text
        gemma4_text gemma4_unified_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_neox granite granitemoe granitemoehybrid
        granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2
        kolibri1 lfm2 lfm2_moe lfm3 llama llava mellum minimax_m2 ministral ministral3 mistral3 mixtral nemotron
        nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
        qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 zaya""",
    "all features but blocks": """bamba jamba""",
    "all features but compactor": """ctrl nanochat""",
    "all features but compactor, images": """ernie4_5_vl_moe""",
    "all features but criticalkv, kernels": """axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear
        longcat_flash minicpm3 youtu""",
    "all features but criticalkv, kernels, images": """kimi_k25""",
    "all features but images": """aria aya_vision cohere2_vision cosmos3_edge cosmos3_omni deepseek_vl
        deepseek_vl_hybrid exaone4_5 fuyu granite_docling hunyuan_vl hyperclovax_vision_v2 idefics3 internvl lfm2_vl
        lfm3_vl lighton_ocr llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 mllama
        muse_glimmer ovis2 paddleocr_vl qianfan_ocr shieldgemma2 smolvlm step3p7 video_llama_3 video_llava vipllava""",
    "all features but images in a second turn": """glm46v glm4v glm4v_moe glm_ocr glmga qwen2_5_vl qwen2_vl qwen3_5
        qwen3_5_moe qwen3_vl qwen3_vl_moe""",
    "all features but images, sdpa": """got_ocr2 pp_chart2table""",
    "all features but images, sound": """gemma4 gemma4_unified phi4_multimodal""",
    "all features but kernels": """laguna""",
    "all features but sdpa": """flint gemma2 gpt_oss granite_swa granitemoe_swa mimo_v2_flash vaultgemma""",
    "all features but sound": """moss_transcribe_diarize""",
    "all features but static_steps": """llama4 llama4_text""",
    "all features but turns, compactor, images, sound": """qwen2_5_omni_thinker qwen3_omni_moe_thinker""",
    "all features but windows-only": """mistral""",
}
# Until here.
TESTED = {name: what for what, names in FOUND.items() for name in names.split()}

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
