"""Tiny random models that read images or audio beside text, and prompts for them."""

import torch
import transformers
from transformers import CONFIG_MAPPING

from .families import tiny
from .models import SHAPE

VOCAB, IMAGE, AUDIO = 128, 120, 121
START, END = 122, 123
TEXT = {**SHAPE, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
# Encoders of more layers than the decoder, and the parts of configs of models that hear; those that see: `families`.
EARS = {"num_mel_bins": 8, "max_source_positions": 16}
QWEN = {"d_model": 32, "encoder_layers": 6, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
VOXTRAL = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 2}
CLASSES = {"qwen2_audio": "Qwen2AudioForConditionalGeneration", "voxtral": "VoxtralForConditionalGeneration"}
MODELS = {
    "qwen2_audio": {
        "text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": EARS | QWEN, "audio_token_index": AUDIO,
    },
    "voxtral": {
        "text_config": {**TEXT, "model_type": "llama"}, "audio_config": EARS | VOXTRAL, "audio_token_id": AUDIO,
    },
}  # fmt: skip
ROTARY_3D = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SEE = ("gemma3", "llava", "mistral3", *ROTARY_3D)
HEAR = ("qwen2_audio", "voxtral")


def build(name, base="sdpa"):
    """A seeded model whose attention matters: weights large enough that what is attended to shows in the logits."""
    if name in SEE:
        return tiny.build(name, base)
    config = CONFIG_MAPPING[name](**MODELS[name])
    config._attn_implementation = base
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[name])(config).eval()
    tiny.randomise(model)
    model.generation_config.eos_token_id = None
    return model


def text(num, seed=1, batch=1):
    """Random ids [B, T] of text."""
    return torch.randint(3, 110, (batch, num), generator=torch.Generator().manual_seed(seed))


def medium(name, seed=5):
    """Ids [1, T] of one image or sound in a prompt, and what else the model is given of it."""
    generator = torch.Generator().manual_seed(seed)
    if name in ROTARY_3D:
        ids = torch.tensor([[START, *[IMAGE] * 16, END]])
        patches = torch.randn(16, 3 * 8 * 8, generator=generator)
        return ids, {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    if name == "qwen2_audio":
        sound = {"input_features": torch.randn(1, 8, 32, generator=generator)}
        return torch.full((1, 8), AUDIO), {**sound, "feature_attention_mask": torch.ones(1, 32, dtype=torch.long)}
    if name == "voxtral":
        return torch.full((1, 4), AUDIO), {"input_features": torch.randn(1, 8, 32, generator=generator)}
    given = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    if name == "mistral3":
        given["image_sizes"] = torch.tensor([[16, 16]])
    return torch.full((1, 4), IMAGE), given


def types(name, ids):
    """The types of tokens that the model's processor gives beside ids."""
    called = {"gemma3": "token_type_ids"} | dict.fromkeys(ROTARY_3D, "mm_token_type_ids")
    return {called[name]: (ids == IMAGE).long()} if name in called else {}


def told(name, *parts):
    """What the model and generate are given of ids [1, T] in parts, without images and sounds."""
    ids = torch.cat(parts, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types(name, ids)}


def prompt(name, before=21, after=17):
    """Text with one image or sound in it, as arguments of the model and of generate."""
    own, given = medium(name)
    return told(name, text(before), own, text(after, 2)) | given


def generated(model, given, new=6, **options):
    """Logits [B, new, vocabulary] of greedy generation, of text only, and its whole result."""
    options = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "pad_token_id": 0, **options}
    options["suppress_tokens"] = [*range(110, VOCAB)]
    out = model.generate(**given, return_dict_in_generate=True, **options)
    return torch.stack(out.logits, 1), out
