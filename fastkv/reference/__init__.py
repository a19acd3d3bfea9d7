"""The specification: every equation of fastkv in plain torch, under the names and signatures of `fastkv.ops`.

Read in this order:

- `moments`: what anything that is remembered of evicted tokens can do; their first and second moments (MomentKV).
- `centroids`: the same with a few weighted pairs instead of a matrix.
- `slots`: how keys and values are stored: in the model's dtype, or in 8 or 4 bits.
- `state`: what one layer remembers, and how it attends.
- `attention`: attention over retained tokens, with or without their value (VECTOR), mixed with one of these estimates;
  that of tokens which are read a second time (KVzip).
- `scores`: how much a token matters (KeyDiff, SnapKV, StreamingLLM, random), and its value to the output (CriticalKV).
- `geometry`: the same from the keys' geometry and from their neighbours (ManifoldKV, Compactor).
- `selection`: which tokens stay, and how the others are remembered.
- `gather`: whole rows by index, and of slots that heads share unequally.

Notation: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, T new tokens, N candidates, C slots, D head size.
Computation is in float32, or in float64 if the inputs are float64.
"""

from .attention import (
    append,
    attention_ahead,
    check_decode,
    check_most_attended,
    decode_attention,
    decode_step,
    merge_partials,
    most_attended,
    predicted_values,
    prefill_attention,
    with_sink,
)
from .centroids import Centroids, centroid_estimate
from .gather import pack, pack_known, rows_at, unpack
from .geometry import (
    check_leverage,
    check_metric,
    leverage_scores,
    make_sketch,
    manifold_scores,
    noncausal_attention_mass,
    sketched_leverage,
)
from .moments import Evicted, Moments, compute_dtype, moment_estimate, moment_residual, moment_scores
from .scores import (
    check_keydiff,
    check_pool,
    chunk_mean,
    expected_attention,
    keydiff_scores,
    known_or_mean,
    needed_scores,
    neighbour_mean,
    observed_attention,
    output_norms,
    pool_scores,
    position_order,
    queries_ahead,
    random_scores,
    window_attention,
    window_scores,
    z_scores,
)
from .selection import (
    Selection,
    blocks_of,
    candidates,
    compact,
    compact_in_copy,
    in_order,
    joined,
    of_blocks,
    protected,
    ranks,
    remember,
    select,
    select_each,
    slot_signals,
)
from .slots import FORMATS, FP8, INT4, INT8, PLAIN, Codec, RowFormat, SlotFormat, Stored, rotated, slot_format, step_of
from .state import LayerState, Recovery, Slots, Spec
