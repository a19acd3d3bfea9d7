"""Writing a file so that whoever reads it sees the old one or the whole new one."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import FastKVError


def replace_file(path: Path, content: bytes) -> None:
    """Write next to `path`, then rename over it, which is atomic.

    Raises: FastKVError if that fails; what was there before is then still there.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise FastKVError(
            f"{path} cannot be written ({error.strerror or error}) and is as it was; choose a file in a directory that "
            "exists and is writable"
        ) from error
    finally:
        if fresh.is_file():
            fresh.unlink()
