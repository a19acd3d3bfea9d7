"""Tiny random models of every decoder type that the installed transformers has.

A model is built from its type's default config, in which every size is replaced by a small one, whatever the type calls
it, and of whose layers one of each kind stays. `CHANGES` is what that does not get right, one small entry per type.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

VOCAB, IMAGE = 128, 120  # the tokens from IMAGE on stand for pictures and the like
LARGEST = 60_000_000  # parameters of what may be called tiny
LAYERS = 4
SIZES = {
    "hidden_size d_model n_embd model_dim embedding_dim emb_dim block_dim lru_width word_embed_proj_dim "
    "embedding_size text_hidden_size": 64,
    "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff d_inner intermediate_size_mlp block_ff_dim "
    "dense_intermediate_size dim_ff dff decoder_ffn_dim": 96,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers layers": LAYERS,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads linear_num_heads "
    "linear_num_value_heads mamba_n_heads mamba_num_heads swa_num_attention_heads num_sliding_attention_heads "
    "num_decoder_attention_heads": 4,
    "num_key_value_heads num_kv_heads kv_n_heads linear_num_key_heads swa_num_key_value_heads num_query_groups "
    "num_global_key_value_heads": 2,
    "head_dim swa_head_dim kv_channels d_kv d_head qk_nope_head_dim qk_rope_head_dim v_head_dim swa_v_head_dim "
    "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim indexer_head_dim dim_head "
    "attention_head_size kv_lora_rank rotary_dim ssm_state_size mamba_d_state state_size chunk_size mamba_chunk_size "
    "hidden_size_per_layer_input attention_chunk_size max_inference_chunksize router_hidden_size adapter_rank": 16,
    "global_head_dim q_lora_rank moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size mamba_d_head mamba_head_dim mamba_headdim "
    "shared_experts_intermediate_size share_expert_dim gated_norm_rank hc_lowrank o_lora_rank "
    "moe_hidden_size": 32,
    "mamba_d_ssm attention_hidden_size": 128,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k mamba_expand expand altup_num_inputs "
    "index_n_heads indexer_n_heads zero_expert_num num_dense_layers o_groups hc_mult hc_count": 2,
    "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group "
    "first_k_dense_replace mamba_n_groups mamba_ngroups n_groups": 1,
    "laurel_rank sliding_window sliding_window_size attention_window_size local_attention keep_window_size": 8,
    "mamba_dt_rank time_step_rank n_mamba_heads": 4,
    "max_position_embeddings n_positions max_seq_len index_topk n_ctx model_max_length context_length": 512,
    "vocab_size vocab_size_per_layer_input unpadded_vocab_size": VOCAB,
}
ENCODER = {
    "hidden_size embed_dim d_model intermediate_size ffn_dim mlp_dim encoder_ffn_dim encoder_hidden_size hidden_dim "
    "projection_dim proj_dim": 32,
    "num_hidden_layers depth num_layers encoder_layers n_layers": 2,
    "num_attention_heads num_heads encoder_attention_heads num_key_value_heads attention_heads": 2,
    "image_size num_position_embeddings position_embedding_size head_dim window_size": 16,
    "patch_size": 8,
    "spatial_merge_size temporal_patch_size num_global_layers": 1,
    "num_channels in_channels": 3,
    "out_hidden_size output_dim": 64,
}
TOKENS = {
    "image_token_id image_token_index": IMAGE,
    "video_token_id video_token_index": 121,
    "boi_token_id boi_token_index vision_start_token_id image_start_token_id": 122,
    "eoi_token_id eoi_token_index vision_end_token_id image_end_token_id": 123,
    "audio_token_id audio_token_index": 124,
    "boa_token_id": 125,
    "eoa_token_id eoa_token_index": 126,
}
# Set also where the default is None, which usually means that a feature is off.
ALWAYS = (
    "head_dim num_key_value_heads n_routed_experts n_shared_experts moe_intermediate_size num_experts_per_tok".split()
)

SLIDING = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64}
INDEXER["indexer_compress_ratio"] = 4


def rope(*sections):
    """Rotary parameters whose pairs of dimensions turn by time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


# Two layers of full attention have keys of their own, and the second shares them with two others.
SHARED = {"num_hidden_layers": 6, "layer_types": [SLIDING[1], *SLIDING[:2]] * 2, "num_kv_shared_layers": 3}
GEMMA4 = {"num_kv_shared_layers": 0, "global_head_dim": 32}
LLAMA4_VISION = {"intermediate_size": 128}  # four patches in one
LLAMA4_VISION |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32)
# What is told here is a field of the text model's config, unless it is the name of a part; "" is the whole.
CHANGES = {
    **{key: {"sliding_window": None} for key in "mistral mixtral starcoder2 phi3 phimoe ministral3".split()},
    "mistral3": {"sliding_window": None, "": {"spatial_merge_size": 1}},
    "paligemma": {"": {"projection_dim": 64}, "vision_config": {"projection_dim": 64}},
    "ministral": {"layer_types": SLIDING},
    "dots1": {"layer_types": SLIDING, "sliding_window": 8},
    "smollm3": {"layer_types": SLIDING, "sliding_window": 8, "no_rope_layers": [1, 0, 1, 0]},
    "granitemoehybrid": {"layer_types": LINEAR},
    **{key: {"layer_types": ["conv", "full_attention"] * 2} for key in ("lfm2", "lfm2_moe")},
    **{key: {"num_kv_shared_layers": 0} for key in ("gemma3n_text", "gemma3n")},
    **dict.fromkeys("gemma4_text gemma4 gemma4_unified gemma4_unified_text".split(), GEMMA4),
    "mllama": {"cross_attention_layers": []},
    "llama4": {"moe_layers": [1, 3], "vision_config": LLAMA4_VISION},
    "llama4_text": {"moe_layers": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "zaya": {"num_experts_per_tok": 1},
    "qwen2_vl": {**rope(4, 2, 2), "vision_config": {"hidden_size": 64}},
    **{key: {"vision_config": {"deepstack_visual_indexes": [0, 1]}} for key in ("qwen3_vl", "qwen3_vl_moe")},
    **dict.fromkeys(("qwen2_5_vl", "paddleocr_vl", "glm4v", "glm46v", "glmga", "glm_ocr"), rope(4, 2, 2)),
    "glm4v_moe": {"head_dim": 32, **rope(4, 2, 2)},
    "qwen2_5_omni_thinker": {**rope(4, 2, 2), "": {"vision_start_token_id": 122}},
    "qwen3_omni_moe_thinker": {"": {"vision_start_token_id": 122}},
    "ernie4_5_vl_moe": {**rope(3, 3, 2), "moe_intermediate_size": [32, 32]},
    "hunyuan_vl": rope(2, 2, 2, 2),
    "deepseek_v2": {"num_experts_per_tok": 2},
    "step3p7": {"sliding_window": 8},
    "mamba2": {"head_dim": 32},
    "rwkv": {"attention_hidden_size": 64},
    "glm5_next": {"qk_rope_head_dim": 0},
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), INDEXER),
    **{key: {"logit_scale": 1.0} for key in ("cohere", "cohere2", "cohere2_moe")},
    "gemma3": {"mm_tokens_per_image": 4},
}
# What transformers raises where a config does not fit, or a package is missing.
BROKEN = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError)
BROKEN = (*BROKEN, RuntimeError, TypeError, ValueError, StrictDataclassError)
MLA = ("kv_lora_rank",)  # whose keys and values have as many heads as queries


@dataclass(frozen=True)
class Kind:
    """A model to build.

    Attributes:
        model_type: in transformers.  variant: a word for what is special, empty for the type as it usually is.
        changes: fields of the tiny config, nested for its parts, which win over `CHANGES`.
    """

    model_type: str
    variant: str = ""
    changes: dict = field(default_factory=dict)

    @property
    def name(self):
        """As it is asked for and printed."""
        return f"{self.model_type}:{self.variant}" if self.variant else self.model_type


VARIANTS = (
    Kind("gemma3n_text", "shared-keys", {"num_kv_shared_layers": 2}),
    Kind("gemma4_text", "shared-keys", SHARED),
    Kind("mllama", "cross-attention", {"cross_attention_layers": [1]}),
    Kind("mistral", "windows-only", {"sliding_window": 8}),
)
VARIANTS = {kind.name: kind for kind in VARIANTS}


class CannotBuild(RuntimeError):
    """There is no tiny model of this type; the message is the reason."""


class DoesNotExist(CannotBuild):
    """The installed transformers has no such type."""


def kinds():
    """Names of all types of the installed transformers that generate text, then of the variants."""
    types = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return [*sorted(types), *(name for name, kind in VARIANTS.items() if kind.model_type in types)]


def kind_of(name):
    """The kind of that name. Raises DoesNotExist."""
    kind = VARIANTS.get(name, Kind(name))
    if kind.model_type not in CONFIG_MAPPING:
        raise DoesNotExist(f"transformers {transformers.__version__} has no model type {kind.model_type!r}")
    return kind


def auto_class(model_type):
    """transformers' class that makes models of the type; with its encoders, where it has any. Raises DoesNotExist."""
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    raise DoesNotExist(f"transformers {transformers.__version__} generates no text with {model_type!r}")


def by_name(table):
    """One entry per name."""
    return {name: value for names, value in table.items() for name in names.split()}


SIZES, ENCODER, TOKENS = by_name(SIZES), by_name(ENCODER), by_name(TOKENS)


def is_config(value):
    return isinstance(value, transformers.PreTrainedConfig)


def is_text(name, config):
    """Whether a part of a config is the text model."""
    return not any(one in f"{name} {config.model_type}" for one in ("vision", "visual", "audio", "vq", "former", "sam"))


def shrunk(config, changes):
    """Arguments for the class of this default config that make it tiny."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    parts = {name: value for name, value in fields.items() if is_config(value)}
    text_of = {name for name, part in parts.items() if hasattr(part, "vocab_size") and is_text(name, part)}
    main = next((name for name in ("text_config", "llm_config", *sorted(text_of)) if name in text_of), None)
    own = {name: dict(changes.get(name, {})) for name in parts}
    outer = {key: value for key, value in changes.items() if key and key not in parts}
    if main is not None:
        own[main] |= {key: value for key, value in outer.items() if key not in fields}
        outer = {key: value for key, value in outer.items() if key in fields}
    smaller = {name: shrunk if name in text_of else partial(resized, sizes=ENCODER) for name in parts}
    made = {name: type(part)(**smaller[name](part, changes=own[name])) for name, part in parts.items()}
    return made | resized(config, SIZES if main is None else TOKENS, {**outer, **changes.get("", {})})


def resized(config, sizes, changes):
    """Arguments that replace the sizes of one config without parts."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    given = [
        name for name, value in fields.items() if not isinstance(value, list) and (value is not None or name in ALWAYS)
    ]
    made = {name: sizes[name] for name in given if name in sizes}
    if sizes is SIZES:
        made |= layers_of(fields, made)
        made |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
        if any(name in fields for name in MLA) and "num_key_value_heads" in made:
            made["num_key_value_heads"] = SIZES["num_attention_heads"]
        rope = fields.get("rope_parameters")
        if isinstance(rope, dict) and "mrope_section" in rope:
            made["rope_parameters"] = sections(rope)
    return made | changes


def layers_of(fields, sizes):
    """Lists with an entry for each layer, cut to one layer of each kind, and these over again to `LAYERS` of them."""
    counts = [name for name in sizes if (SIZES[name] == LAYERS and "layers" in name) or name == "n_layer"]
    number = fields[counts[0]] if counts else 0
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == number > 0}
    lists = {name: value for name, value in lists.items() if value != list(range(number))}
    kinds = list(dict.fromkeys(zip(*lists.values())))
    if not kinds:
        return {}
    kept = [kinds[at % len(kinds)] for at in range(max(LAYERS, len(kinds)))]
    made = {name: [kind[at] for kind in kept] for at, name in enumerate(lists)}
    made = {name: [SIZES.get(name, value) for value in values] for name, values in made.items()}
    return made | {name: len(kept) for name in counts}


def sections(rope):
    """Rotary parameters whose dimensions for time, height and width share a head of 16."""
    share = max(rope.get("partial_rotary_factor", 1.0), 0.5)
    pairs, number = int(SIZES["head_dim"] * share) // 2, len(rope["mrope_section"])
    made = {**rope, "mrope_section": [pairs // number + (at < pairs % number) for at in range(number)]}
    return made | ({"partial_rotary_factor": share} if "partial_rotary_factor" in rope else {})


def tiny_config(kind):
    """A small config of the kind."""
    cls = CONFIG_MAPPING[kind.model_type]
    return cls(**shrunk(cls(), {**CHANGES.get(kind.model_type, {}), **kind.changes}))


def randomise(model, seed=0):
    """Weights with which attention is sharp and logits are of the order of 5; norms stay as they are made."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor, deviation, mean=0.0):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation + mean)

    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        if "sink" in name:
            normal(weight, 1.0, 1.0)
        elif weight.ndim >= 2:
            normal(weight, 1.5 / math.sqrt(weight[0].numel() if weight.ndim == 2 or "conv" in name else 64))
        elif name.endswith("bias") and "dt_bias" not in name:
            normal(weight, 0.1)
        elif not weight.isfinite().all():
            weight.fill_(0.5)


def build(name, attention="sdpa", seed=0, **changes):
    """A seeded tiny model in fp32, with more changes of its config. Raises DoesNotExist, or CannotBuild with why."""
    kind = kind_of(name)
    kind = replace(kind, changes=kind.changes | changes)
    cls = auto_class(kind.model_type)
    try:
        config = tiny_config(kind)
        with torch.device("meta"):
            size = sum(p.numel() for p in cls.from_config(copy.deepcopy(config)).parameters())
        if size > LARGEST:
            raise CannotBuild(f"the smallest config that is known has {size / 1e6:.0f} million parameters")
        torch.manual_seed(seed)
        model = cls.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except BROKEN as error:
        reason = " ".join(str(error).split()).split(". Please")[0]
        if "does not support an attention implementation" in reason:
            raise CannotBuild(f"transformers has no {attention} attention for it") from error
        raise CannotBuild(reason if isinstance(error, CannotBuild) else f"{type(error).__name__}: {reason}") from error
    if not hasattr(model, "generation_config"):
        raise CannotBuild(f"{type(model).__name__} generates no text")
    with torch.no_grad():
        randomise(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
