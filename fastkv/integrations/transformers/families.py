"""Model families: what differs between them, as data. Which layers slide a window follows `config.layer_types`."""

from __future__ import annotations

from dataclasses import dataclass

BASES = ("eager", "sdpa", "flash_attention_2")


@dataclass(frozen=True)
class Family:
    """What fastkv must know of a model family.

    Attributes:
        name: for messages.
        model_types: `config.model_type` of the text models that belong to it.
        bases: attention implementations that compute what the model means.
        softcap: name of the config field of the logit soft-cap that the family passes to attention, if any.
        example: a checkpoint of the family that a user would recognise.
    """

    name: str
    model_types: tuple[str, ...]
    bases: tuple[str, ...] = BASES
    softcap: str | None = None
    example: str = ""


LLAMA = Family("Llama", ("llama",), example="meta-llama/Llama-3.1-8B-Instruct")  # 2 to 3.3 and their like
# Version 0.1 slides a window in every layer and is refused; from 0.2 on every layer attends to everything.
MISTRAL = Family("Mistral", ("mistral",), example="mistralai/Mistral-7B-Instruct-v0.3")
# Biases (2) or norms (3) on q and k act before the cache, so nothing differs here.
QWEN = Family("Qwen", ("qwen2", "qwen3", "qwen3_moe"), example="Qwen/Qwen3-4B-Instruct-2507")
# Gemma 2 soft-caps its attention logits, which sdpa ignores. Gemma 3 stores the same field but never applies it, so the
# cap that counts is the one the module passes to attention. `query_pre_attn_scalar` arrives as the module's scaling.
GEMMA2 = Family("Gemma 2", ("gemma2",), softcap="attn_logit_softcapping", example="google/gemma-2-9b-it")
GEMMA3 = Family("Gemma 3", ("gemma3_text",), example="google/gemma-3-12b-it")
# Every query head has a learned sink, which transformers computes in eager attention only. Half of the layers slide.
GPT_OSS = Family("gpt-oss", ("gpt_oss",), bases=("eager",), example="openai/gpt-oss-20b")

FAMILIES = (LLAMA, MISTRAL, QWEN, GEMMA2, GEMMA3, GPT_OSS)
