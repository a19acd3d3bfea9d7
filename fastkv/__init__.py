"""fastkv: a KV cache of fixed size for stock Hugging Face models that remembers what it evicted.

    import fastkv
    fastkv.patch(model, budget=1024)
    model.generate(...)

Importing this package changes nothing in torch or transformers, and imports neither until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import corrections, ops, policies, reference, rotary
    from .api import compress, patch, patched, unpatch
    from .budget import Budget
    from .calibration import HeadShares
    from .errors import FastKVError
    from .integrations.transformers.cache import FastKVCache
    from .integrations.transformers.calibrate import calibrate_heads
    from .integrations.transformers.captured import capture_decode
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
    "compress",
    "corrections",
    "ops",
    "patch",
    "patched",
    "policies",
    "reference",
    "rotary",
    "unpatch",
]
PLACES = {
    "Budget": "budget",
    "FastKVAttention": "module",
    "FastKVCache": "integrations.transformers.cache",
    "FastKVError": "errors",
    "HeadShares": "calibration",
    "calibrate_heads": "integrations.transformers.calibrate",
    "capture_decode": "integrations.transformers.captured",
    "compress": "api",
    "patch": "api",
    "patched": "api",
    "unpatch": "api",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = PLACES.get(name)
    module = import_module(f".{place or name}", __name__)
    globals()[name] = found = getattr(module, name) if place else module
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
