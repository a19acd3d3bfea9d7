"""How fastkv plugs into transformers. `base` attaches and detaches; each family is a few lines of data."""

from .attach import Family, attach, check, detach
from .gemma import GEMMA2, GEMMA3
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen import QWEN

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN, GEMMA2, GEMMA3)

__all__ = ["FAMILIES", "Family", "attach", "check", "detach"]
