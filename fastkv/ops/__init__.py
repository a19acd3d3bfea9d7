"""The operations of the flow: names and signatures of `fastkv.reference`, plus a backend; every caller comes here.

Each operation that has a kernel is one opaque torch operator (`torch.ops.fastkv.*`) with declared mutation and a fake
implementation, so it compiles, graph-captures and passes `opcheck`. Its body chooses: Triton kernels (imported on first
use) on an accelerator; on a CPU `fastkv.cpu` where it can, else the reference. `backend="triton"` on a CPU runs the
kernels in Triton's interpreter, for tests. Functions without a kernel are the reference itself, on any device.
"""

from ..reference import (
    chunk_mean,
    moment_estimate,
    moment_residual,
    output_norms,
    pool_scores,
    protected,
    random_scores,
    streaming_scores,
)
from .centroids import centroid_attention, centroids_add
from .decode import decode_attention, decode_step, workspace
from .evict import evict
from .prefill import compact, prefill_attention, select
from .scores import (
    keydiff_scores,
    leverage_scores,
    manifold_scores,
    moment_scores,
    noncausal_attention_mass,
    window_attention,
    window_scores,
)
from .vector import vector_decode_attention, vector_decode_step, vector_workspace

__all__ = [
    "centroid_attention",
    "centroids_add",
    "chunk_mean",
    "compact",
    "decode_attention",
    "decode_step",
    "evict",
    "keydiff_scores",
    "leverage_scores",
    "manifold_scores",
    "moment_estimate",
    "moment_residual",
    "moment_scores",
    "noncausal_attention_mass",
    "output_norms",
    "pool_scores",
    "prefill_attention",
    "protected",
    "random_scores",
    "select",
    "streaming_scores",
    "vector_decode_attention",
    "vector_decode_step",
    "vector_workspace",
    "window_attention",
    "window_scores",
    "workspace",
]
