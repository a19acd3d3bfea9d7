"""Equal bytes, for reports: the one formula and the one check, which the demo has too."""

from ..demo.equal_bytes import (
    EVICT_EVERY,
    assert_equal_bytes,
    equal_bytes,
    state_token_bytes,
    stored_bytes,
    token_bytes,
)

__all__ = ["EVICT_EVERY", "assert_equal_bytes", "equal_bytes", "state_token_bytes", "stored_bytes", "token_bytes"]
