"""The operations of the flow, under the names of `fastkv.reference`; every caller goes through here.

This version has one backend, the reference, on every device.
"""

from .reference import (
    append,
    check_keydiff,
    check_pool,
    chunk_mean,
    compact,
    decode_attention,
    decode_step,
    evict,
    keydiff_scores,
    moment_estimate,
    moment_residual,
    pool_scores,
    prefill_attention,
    protected,
    random_scores,
    select,
    streaming_scores,
    window_attention,
    window_scores,
)

BACKENDS = ("auto", "reference")

__all__ = [
    "BACKENDS",
    "append",
    "check_keydiff",
    "check_pool",
    "chunk_mean",
    "compact",
    "decode_attention",
    "decode_step",
    "evict",
    "keydiff_scores",
    "moment_estimate",
    "moment_residual",
    "pool_scores",
    "prefill_attention",
    "protected",
    "random_scores",
    "select",
    "streaming_scores",
    "window_attention",
    "window_scores",
]
