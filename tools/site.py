"""The pages and pictures of the repository as a site, each at its own path: a hook of MkDocs (`mkdocs.yml`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SHOWN = (".md", ".png", ".svg", ".json", ".txt", ".cff", ".py", ".css", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """What pages are made of or link to, tracked or new, in place of the files of docs/ alone; no hidden folders."""
    root = Path(config.config_file_path).parent
    for file in [one for one in files if one.src_dir == config.docs_dir]:
        files.remove(file)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if name.endswith(SHOWN) and not name.startswith("."):
            files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files
