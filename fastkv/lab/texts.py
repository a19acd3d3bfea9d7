"""Real texts that come with every Python, and texts that a user gives.

`topics`: Python's language reference (`pydoc_data.topics`).  `library`: docstrings of the standard library.  `code`:
its source without docstrings.  A path: that file, plain or gzip.  The first three depend on the version of Python.
"""

from __future__ import annotations

import ast
import gzip
import sysconfig
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from ..errors import FastKVError

SOURCES = ("topics", "library", "code")
LEFT_OUT = ("test", "tests", "idlelib", "lib2to3", "site-packages", "ensurepip", "pydoc_data", "encodings")
SHORTEST = 200  # characters of a docstring that is more than a label


@cache
def read(source: str) -> str:
    """The whole text of a source: one of `SOURCES`, or the path of a text file.

    Raises: FastKVError if it is neither, or not UTF-8.
    """
    if source == "topics":
        return "\n\n".join(topics[name].strip() for name in sorted(topics))
    if source == "library":
        return "\n\n".join(found for file in _modules() for found in _docstrings(file))
    if source == "code":
        return "\n\n".join(_without_docstrings(file) for file in _modules())
    path = Path(source)
    if not path.is_file():
        raise FastKVError(f"a text is one of {', '.join(SOURCES)} or a file, got {source!r}; check the path")
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise FastKVError(f"{source} is not UTF-8 text ({error}); convert it first") from None


def _modules() -> list[Path]:
    """Files of the standard library, sorted; packages of tests and tables left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"))
    return [file for file in files if not {*file.relative_to(root).parts} & {*LEFT_OUT}]


def _parsed(file: Path) -> tuple[str, ast.Module] | None:
    try:
        source = file.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except (SyntaxError, ValueError, OSError):  # templates, and files in other encodings
        return None


def _docstrings(file: Path) -> list[str]:
    parsed = _parsed(file)
    if parsed is None:
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(parsed[1]) if isinstance(node, documented)]
    return [text for text in found if text is not None and len(text) >= SHORTEST]


def _without_docstrings(file: Path) -> str:
    parsed = _parsed(file)
    if parsed is None:
        return ""
    source, tree = parsed
    lines = source.splitlines()
    gone: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            gone.update(range(first.lineno - 1, first.end_lineno or first.lineno))
    return "\n".join(line for place, line in enumerate(lines) if place not in gone)
