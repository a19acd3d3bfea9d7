"""What `fastkv eval` and `python -m fastkv.evaluation` ask of lm-evaluation-harness: its tasks, and plain refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import FastKVError
from . import TASK_FILES

OWN = "fastkv_"  # how the names of fastkv's tasks begin


def load_tasks(tasks: list[str], include_path: str | None, metadata: dict[str, Any]) -> Any:
    """The harness's task manager, after all tasks were loaded once.

    Args: tasks: names or YAML files.  include_path: folder with the user's YAML files.  metadata: for all tasks.
    Raises: FastKVError for a task that does not exist, whose dataset cannot be read, or that needs a package that is
        not there; it says what to do.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=[TASK_FILES, *([include_path] if include_path else [])],
        # Indexing the thousands of tasks that come with the harness takes a while; files and own tasks do without.
        include_defaults=not all(Path(task).is_file() or task.startswith(OWN) for task in tasks),
        metadata=metadata,
    )
    for task in tasks:
        try:
            manager.load([task])
        except FastKVError:
            raise
        except KeyError as error:
            raise FastKVError(
                f"lm-evaluation-harness knows no task {task!r}; lm-eval ls tasks lists what it knows, --include-path "
                "adds your own"
            ) from error
        except ImportError as error:
            raise FastKVError(f"task {task} needs a package that is not installed: {first_line(error)}") from error
        except (OSError, ValueError) as error:  # what `datasets` raises without a connection, a file or a configuration
            name = culprit(manager, task)
            entry = manager.task_index.get(name)
            dataset = (entry.cfg if entry is not None else {}).get("dataset_path") or "its dataset"
            source = entry.yaml_path if entry is not None else name
            raise FastKVError(
                f"task {name} cannot load {dataset} ({first_line(error)}); {advice(source, Path(name).stem)}"
            ) from error
    return manager


def culprit(manager: Any, task: str) -> str:
    """The first task of a group or tag that cannot be loaded, or the task itself."""
    for name in members(manager.task_index.get(task)):
        try:
            manager.load([name])
        except (OSError, ValueError, ImportError):
            return culprit(manager, name)
    return task


def members(entry: Any) -> list[str]:
    """The names in a group or tag of the harness's index; none for a task, or for what is not in the index."""
    from lm_eval.tasks._index import Kind

    if entry is None or entry.kind not in (Kind.GROUP, Kind.TAG):
        return []
    if entry.kind is Kind.TAG:
        return sorted(entry.tags)
    listed = entry.cfg.get("task") or []
    names = [one.get("group") or one.get("task") if isinstance(one, dict) else one for one in listed]
    return [name for name in names if isinstance(name, str)]


def advice(source: Any, name: str) -> str:
    """How to run a task on a copy of its dataset."""
    return (
        f"copy the dataset to this machine, write a file my.yaml with the lines 'include: {source}', 'task: my_{name}' "
        "and 'dataset_path: FOLDER', and run --tasks my.yaml"
    )


def first_line(error: BaseException) -> str:
    """What an exception says first, to stand inside a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


def metadata_of(words: list[str]) -> dict[str, Any]:
    """`--metadata` as the harness takes it: K=V words, or a JSON object. Raises FastKVError for anything else."""
    from lm_eval._cli.utils import key_val_to_dict, try_parse_json

    found: dict[str, Any] = {}
    for word in words:
        try:
            parsed = try_parse_json(word)
            found |= parsed if isinstance(parsed, dict) else key_val_to_dict(word)
        except ValueError as error:
            raise FastKVError(
                f"metadata must be K=V or a JSON object, got {word!r} ({first_line(error)}); for example "
                "max_seq_lengths=[4096,8192]"
            ) from error
    return found
