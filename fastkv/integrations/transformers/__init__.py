"""How fastkv plugs into transformers: `attach` puts a config on a model, `families` says which types are tested."""

from .attach import attach, check, detach
from .families import REFUSED, TESTED
from .modules import sizes
from .selfcheck import rotations, with_rotations

__all__ = ["REFUSED", "TESTED", "attach", "check", "detach", "rotations", "sizes", "with_rotations"]
