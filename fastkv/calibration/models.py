"""The model that is calibrated: stock, ready, and where it runs fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .. import demo
from ..errors import FastKVError

DEMO = "demo"


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The bundled model for "demo", else a transformers model on the first GPU if there is one, and its tokenizer.

    Raises: FastKVError if there is no such causal language model.
    """
    if name == DEMO:
        return demo.load()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise FastKVError(f"{name} cannot be loaded as a causal language model; name a folder or a model") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def check_stock(what: str, model: Module) -> None:
    """Raise FastKVError, in the name of `what`, if the model is patched or in training."""
    kind = type(model).__name__
    if any("_fastkv_config" in vars(module) for module in model.modules()):
        raise FastKVError(
            f"{what} needs the stock model, got a patched {kind} whose cache is compressed; call fastkv.unpatch(model) "
            "first"
        )
    if model.training:
        raise FastKVError(f"{what} needs a model in eval mode, got {kind} in training; call model.eval()")
