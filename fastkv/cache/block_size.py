"""How many tokens a block of a prompt should have, from what the device can compute while it reads the weights once."""

from __future__ import annotations

import torch

ELSEWHERE = 512  # where the device does not say how fast it is: CPUs, AMD
SMALLEST, LARGEST = 128, 2048
HEADROOM = 2  # a block that just balances the two leaves nothing for attention, scores and launches
# Half-precision operations of the tensor cores per cycle and multiprocessor, from NVIDIA's architecture white papers.
PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (9, 0): 4096, (10, 0): 8192}


def block_tokens(device: torch.device, dtype: torch.dtype) -> int:
    """Tokens of a block that is as fast per token as a whole prompt, a power of two.

    Every block reads all weights again: P parameters of b bytes take P b / bandwidth seconds, and n tokens take 2 P n /
    compute. From n = b compute / (2 bandwidth) on, the weights come for free. One H200 in bfloat16: about 230, so 512.

    Args: device, dtype: of the weights.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return ELSEWHERE
    properties = torch.cuda.get_device_properties(device)
    per_cycle = PER_CYCLE.get((properties.major, properties.minor))
    clock, memory = getattr(properties, "clock_rate", 0), getattr(properties, "memory_clock_rate", 0)  # kHz
    if per_cycle is None or not clock or not memory:
        return ELSEWHERE
    size = dtype.itemsize
    compute = per_cycle * properties.multi_processor_count * clock * 2 / max(size, 2)
    bandwidth = 2 * memory * properties.memory_bus_width / 8
    return rounded(HEADROOM * size * compute / (2 * bandwidth))


def rounded(tokens: float) -> int:
    """The next power of two within reason."""
    return min(max(1 << (round(tokens) - 1).bit_length(), SMALLEST), LARGEST)
