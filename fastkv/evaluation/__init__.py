"""Evidence for choosing a policy: tasks, fidelity to the full cache, and reports, all at equal bytes.

Importing this package registers the model "fastkv" with lm-evaluation-harness where that is installed; the harness then
runs it by name, as in `python -m fastkv.evaluation --model fastkv --model_args pretrained=PATH,policy=keydiff ...`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import check_installed

if TYPE_CHECKING:
    from .plugins import FastKVLM

__all__ = ["TASK_FILES", "FastKVLM"]

TASK_FILES = Path(__file__).parent / "tasks"  # what the harness takes as --include_path: fastkv's own tasks


def check_harness() -> None:
    """Raise FastKVError unless lm-evaluation-harness is installed."""
    check_installed("running tasks of lm-evaluation-harness", "eval")


if importlib.util.find_spec("lm_eval") is not None:
    from lm_eval.api.registry import model_registry

    # By name, so that whoever only wants fidelity does not wait for the harness's models to be imported.
    model_registry.register("fastkv", target="fastkv.evaluation.plugins:FastKVLM")


def __getattr__(name: str) -> Any:
    if name != "FastKVLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_harness()
    from .plugins import FastKVLM

    return FastKVLM
