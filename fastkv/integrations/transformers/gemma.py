"""Gemma 2 and 3: sliding-window layers stay with transformers, full-attention layers are compressed.

Gemma 2 soft-caps its attention logits, which sdpa ignores. Gemma 3 stores the same field but never applies it, so the
cap that counts is the one the module passes to attention. `query_pre_attn_scalar` arrives as the module's scaling.
"""

from .attach import Family

GEMMA2 = Family(
    name="Gemma 2",
    model_types=("gemma2",),
    softcap="attn_logit_softcapping",
    example="google/gemma-2-9b-it",
)
GEMMA3 = Family(name="Gemma 3", model_types=("gemma3_text",), example="google/gemma-3-12b-it")
