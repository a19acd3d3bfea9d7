"""The specification: every equation of fastkv in plain torch, under the names and signatures of `fastkv.ops`.

Read in this order:

- `moments`: what is remembered of evicted tokens, and what it says about a new query (MomentKV).
- `centroids`: the same with a few weighted pairs instead of a matrix.
- `attention`: attention over retained tokens, mixed with one of these estimates.
- `scores`: how much a token matters (KeyDiff, SnapKV, StreamingLLM, random).
- `geometry`: the same from the keys' geometry and from their neighbours (ManifoldKV, Compactor).
- `selection`: which tokens stay, and how the others are merged into the moments.
- `ragged`: slots that heads share unequally.  `gather`: whole rows by index.
- `output`: what a token's value does to the layer's output (CriticalKV).
- `kvzip`: attention of tokens that are read a second time (KVzip).
- `vector`: decoding where some tokens keep their key but no value (VECTOR).

Notation: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, T new tokens, N candidates, C slots, D head size.
Computation is in float32, or in float64 if the inputs are float64.
"""

from .attention import append, decode_attention, decode_step, merge_partials, prefill_attention
from .centroids import Centroids, centroid_estimate
from .geometry import (
    check_leverage,
    check_metric,
    leverage_scores,
    make_sketch,
    manifold_scores,
    noncausal_attention_mass,
    sketched_leverage,
)
from .kvzip import most_attended
from .moments import Moments, moment_estimate, moment_residual
from .output import output_norms
from .ragged import pack, unpack
from .scores import (
    check_keydiff,
    check_pool,
    chunk_mean,
    keydiff_scores,
    knorm_scores,
    neighbour_mean,
    pool_scores,
    position_order,
    random_scores,
    streaming_scores,
    window_attention,
    window_scores,
    z_scores,
)
from .selection import Selection, compact, evict, joined, protected, select, select_each
from .vector import vector_decode_attention, vector_decode_step

__all__ = [
    "Centroids",
    "Moments",
    "Selection",
    "append",
    "centroid_estimate",
    "check_keydiff",
    "check_leverage",
    "check_metric",
    "check_pool",
    "chunk_mean",
    "compact",
    "decode_attention",
    "decode_step",
    "evict",
    "joined",
    "keydiff_scores",
    "knorm_scores",
    "leverage_scores",
    "make_sketch",
    "manifold_scores",
    "merge_partials",
    "moment_estimate",
    "moment_residual",
    "most_attended",
    "neighbour_mean",
    "noncausal_attention_mass",
    "output_norms",
    "pack",
    "pool_scores",
    "position_order",
    "prefill_attention",
    "protected",
    "random_scores",
    "select",
    "select_each",
    "sketched_leverage",
    "streaming_scores",
    "unpack",
    "vector_decode_attention",
    "vector_decode_step",
    "window_attention",
    "window_scores",
    "z_scores",
]
