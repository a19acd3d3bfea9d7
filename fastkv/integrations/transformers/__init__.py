"""How fastkv plugs into transformers: `attach` puts a config on a model, `families` says what is known of which."""

from .attach import attach, check, detach
from .families import FAMILIES, Family

__all__ = ["FAMILIES", "Family", "attach", "check", "detach"]
