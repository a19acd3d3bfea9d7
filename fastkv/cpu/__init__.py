"""How a CPU does it fast: torch's fused attention, and evictions that touch only the tokens that leave.

Each function has the arguments and results of the one of that name in `reference`, which says what they mean. A CPU's
tensors may be looked at without waiting for a device, so shapes here may follow their contents.
"""

from .attention import decode_step, hiding, prefill_attention, serves, window_attention
from .estimate import centroid_estimate
from .eviction import evict, evicts

__all__ = [
    "centroid_estimate",
    "decode_step",
    "evict",
    "evicts",
    "hiding",
    "prefill_attention",
    "serves",
    "window_attention",
]
