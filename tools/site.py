"""The repository as a site (`mkdocs.yml`): a hook of MkDocs for its files, an extension of griffe for docstrings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SHOWN = (".md", ".png", ".svg", ".json", ".txt", ".cff", ".py", ".ipynb", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """What pages are made of or link to, tracked or new, in place of docs/ alone; nothing hidden, no fixtures."""
    root = Path(config.config_file_path).parent
    for file in [one for one in files if one.src_dir == config.docs_dir]:
        files.remove(file)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if name.endswith(SHOWN) and not name.startswith((".", "tests/fixtures/")):
            files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


class Docstrings(griffe.Extension):
    """Docstrings as Markdown: a list entry for each argument, a paragraph for each part."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring in the project's style: `Args:` with lines `name: what`, or with everything behind it."""
    text = re.sub(r"^(Args|Attributes|Class attributes|Example|Raises|Returns):$", r"\n**\1**\n", text, flags=re.M)
    text = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", text, flags=re.M)
    return re.sub(r"^(Args|Attributes|Cost|Raises|Returns|Source): ", r"\n**\1**: ", text, flags=re.M)
