"""fastkv: a key-value cache of fixed size for stock Hugging Face models that remembers what it evicted.

    import fastkv
    fastkv.patch(model, budget=1024)
    model.generate(...)

Importing this package changes nothing in torch or transformers.
"""

from . import ops, policies, reference
from .api import patch, patched, unpatch
from .budget import Budget
from .calibration.head_shares import HeadShares
from .errors import FastKVError
from .integrations.transformers.cache import FastKVCache
from .integrations.transformers.calibrate import calibrate_heads
from .integrations.transformers.cuda_graphs import capture_decode
from .module import FastKVAttention

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "FastKVAttention",
    "FastKVCache",
    "FastKVError",
    "HeadShares",
    "calibrate_heads",
    "capture_decode",
    "ops",
    "patch",
    "patched",
    "policies",
    "reference",
    "unpatch",
]
