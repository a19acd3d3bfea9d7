"""Run notebooks without Jupyter and write what their cells print into them.

    python -m tools.notebook examples/quickstart.ipynb

Cells are plain Python, run one after another in one namespace; what they print is all they show.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def execute(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every code cell with what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            with redirect_stdout(io.StringIO()) as said:
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            yield cell, said.getvalue()


def printed(cell: dict[str, Any]) -> str:
    """What the file says that a cell prints."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def update(path: Path) -> None:
    """Run the notebook at the path and write its outputs into it."""
    notebook = json.loads(path.read_text())
    for count, (cell, said) in enumerate(execute(notebook), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": said.splitlines(keepends=True)}
        cell.update(execution_count=count, outputs=[stream] if said else [])
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Update the notebooks of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.notebook",
        description="Run notebooks and write what their cells print into them.",
        epilog="example: python -m tools.notebook examples/quickstart.ipynb",
    )
    parser.add_argument("notebooks", nargs="+", type=Path, help="files to run and to rewrite")
    for path in parser.parse_args().notebooks:
        update(path)


if __name__ == "__main__":
    main()
