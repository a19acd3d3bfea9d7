"""Lines of JSON, one a cell: what is there stays, what is missing is measured. Standard library only, for peers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def rows_of(file: Path) -> list[Cell]:
    """The cells in a file, which need not be there yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def missing(file: Path, wanted: Iterable[Cell]) -> list[Cell]:
    """Those of which the file has no row; a line that was cut short when it was written is taken away."""
    text = file.read_text() if file.is_file() else ""
    if not text.endswith("\n") and text:
        file.write_text(text[: text.rfind("\n") + 1])
    have = rows_of(file)
    return [cell for cell in wanted if not any(cell.items() <= row.items() for row in have)]


def add(file: Path, *rows: Cell) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
