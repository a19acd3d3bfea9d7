"""Prompts with an image for the types whose stock models take it as plain tensors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from .tiny import IMAGE, TOKENS

SIDE, PATCH = 16, 8
PATCHES = {"gemma3": 4, "mistral3": 4, "llava": 4, "paligemma": 4, "llama4": 1}  # tokens of an image of SIDE x SIDE
# Those that take images as rows of patches, of which they are told how many stand in a grid: GRID x GRID tokens.
GRID = 4
GRIDDED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
GRIDDED = (*GRIDDED, "glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga")


@dataclass
class Turn:
    """Tokens [1, T] with an image in them, and what else the stock model is given."""

    ids: torch.Tensor
    given: dict


def unchecked(model, images):
    """What goes into the model besides text and is not checked; of images, unless they are."""
    words = {"images": () if images else ("pixel_values", "image_"), "sound": ("audio", "input_features")}
    takes = inspect.signature(model.forward).parameters
    return {kind: "not checked" for kind, some in words.items() if any(word in name for name in takes for word in some)}


def given(model_type, model):
    """A first turn and a second, each with an image of its own; None if the type takes none that is known here."""
    takes = inspect.signature(model.forward).parameters
    if model_type in GRIDDED:
        tokens = GRID * GRID
    elif model_type in PATCHES:
        tokens = PATCHES[model_type]
    else:
        return None
    generator = torch.Generator().manual_seed(5)

    def some(*shape):
        return torch.randn(shape, generator=generator)

    def turn(before, after):
        if "image_grid_thw" in takes:
            vision = model.config.vision_config
            size = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
            extra = {"pixel_values": some(tokens, size), "image_grid_thw": torch.tensor([[1, GRID, GRID]])}
        else:
            extra = {"pixel_values": some(1, 3, SIDE, SIDE)}
        if "image_sizes" in takes and model_type == "mistral3":
            extra["image_sizes"] = torch.tensor([[SIDE, SIDE]])
        start, end = TOKENS["vision_start_token_id"], TOKENS["vision_end_token_id"]
        words = torch.randint(3, IMAGE, (before + after,), generator=generator).tolist()
        ids = torch.tensor([[*words[:before], start, *[IMAGE] * tokens, end, *words[before:]]])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in takes:
                extra[name] = (ids == IMAGE).long()
        return Turn(ids, extra)

    return turn(12, 9), turn(7, 11)
