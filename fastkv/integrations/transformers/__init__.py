"""How fastkv plugs into transformers: `attach` puts a config on a model, `families` says what is known of which."""

from .attach import attach, check, detach
from .families import FAMILIES, Family
from .selfcheck import rotations, with_rotations

__all__ = ["FAMILIES", "Family", "attach", "check", "detach", "rotations", "with_rotations"]
