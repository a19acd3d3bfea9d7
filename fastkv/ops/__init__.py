"""The operations of the flow; every caller comes here.

Each operation that has a kernel is one opaque torch operator (`torch.ops.fastkv.*`, see `operator`). Its body is a
backend's: Triton kernels (imported on first use) on an accelerator, `fastkv.cpu` on a CPU, or the reference.
`backend="triton"` on a CPU runs the kernels in Triton's interpreter, for tests. Functions without a kernel are the
reference itself, on any device.
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
from .operations import (
    compact,
    decode_attention,
    decode_step,
    evict,
    expected_attention,
    keydiff_scores,
    leverage_scores,
    manifold_scores,
    moment_scores,
    most_attended,
    noncausal_attention_mass,
    observed_attention,
    peak_attention,
    prefill_attention,
    remember,
    select,
    select_each,
    sketch,
    sketched_leverage,
    slot_signals,
    window_scores,
    workspace,
    workspace_room,
    z_scores,
)
