"""Needle in a haystack: accuracy over the depth of the needle and the length of the text, as a table and a heat map.

    fastkv needles --model PATH --policies keydiff --budgets 512 --lengths 1024,4096 --depths 0,0.5,1

    from fastkv.evaluation import needles

    with fastkv.patched(model, "keydiff", budget=512):
        found = needles.grid(model, tokenizer, lengths=(1024, 4096), depths=(0, 0.5, 1), samples=10)
    found.save("keydiff.json")
    needles.write_plot(found, "keydiff.png", "KeyDiff, 512 tokens")

The tasks are RULER's needles, and those of `fastkv.demo.tasks` for the bundled model, whose tokenizer knows only the
words of those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..demo import tasks as demo
from ..errors import FastKVError
from . import ruler
from .haystack import scatter
from .ruler_niah import KINDS
from .ruler_sample import Sample, Tokenizer, counter

TASKS = (*KINDS, *demo.TASKS)


@dataclass(frozen=True)
class Grid:
    """What was found where.

    Attributes:
        accuracy: [depths][lengths], mean score of `samples` texts, 0 to 1.
        depths: 0 to 1.  lengths: in tokens, with the answer.  task, samples, seed: as passed to `grid`.
    """

    task: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    seed: int
    accuracy: tuple[tuple[float, ...], ...]

    def save(self, path: str | Path) -> None:
        """Write all of it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def of(cls, record: dict[str, Any]) -> Grid:
        """What was saved, from the JSON object."""
        accuracy = tuple(map(tuple, record["accuracy"]))
        ranges = {name: tuple(record[name]) for name in ("lengths", "depths")}
        return cls(**{**record, **ranges, "accuracy": accuracy})


@torch.no_grad()
def grid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 10,
    seed: int = 0,
    task: str = "niah_single_2",
    *,
    text: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Grid:
    """Ask the model, patched or not, for needles at every depth of texts of every length; greedy, one text at a time.

    All depths of a length have the same texts but for the place of the needle, and so have all models.

    Args:
        task: one of `TASKS`.  text: as in `ruler.generate`.  progress: called with the number of texts done and of all.
    Raises: FastKVError for an unknown task, a depth outside of 0 to 1, or no lengths, depths or samples.
    """
    if not lengths or not depths or samples < 1:
        raise FastKVError(
            f"a grid needs at least one length, depth and sample, got {lengths}, {depths} and {samples}; add some"
        )
    total, done = len(lengths) * len(depths) * samples, 0
    accuracy = []
    for depth in depths:
        row = []
        for length in lengths:
            marks = 0.0
            for index in range(samples):
                sample = needle(task, tokenizer, length, depth, seed, index, text)
                marks += ruler.score(sample, answer(model, tokenizer, sample))
                done += 1
                if progress is not None:
                    progress(done, total)
            row.append(marks / samples)
        accuracy.append(tuple(row))
    return Grid(task, tuple(lengths), tuple(depths), samples, seed, tuple(accuracy))


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """What greedy decoding writes behind the prompt, at most `sample.tokens_to_generate` tokens."""
    inputs = tokenizer(sample.prompt, return_tensors="pt", verbose=False).to(model.device)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    generate: Any = model.generate
    written = generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=sample.tokens_to_generate,
        do_sample=False,
        pad_token_id=padding,
    )
    return str(tokenizer.decode(written[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))


def needle(
    task: str,
    tokenizer: Tokenizer,
    length: int,
    depth: float,
    seed: int = 0,
    index: int = 0,
    text: str | Path | None = None,
) -> Sample:
    """A sample of `task` with the needles that are asked for at `depth`. Raises: FastKVError as `grid` does."""
    if task in KINDS:
        return ruler.generate(task, tokenizer, length, seed, index, depth=depth, text=text)
    if task not in demo.TASKS:
        raise FastKVError(f"expected one of the tasks {', '.join(TASKS)}, got {task!r}; choose one of them")
    if text is not None:
        raise FastKVError(f"{task} has no text, got text={str(text)!r}; leave it out or choose another task")
    return placed(task, tokenizer, length, depth, seed + index)


def placed(task: str, tokenizer: Tokenizer, length: int, depth: float, seed: int) -> Sample:
    """A text of the bundled model's language whose asked fact (all its statements) is at `depth`, 0 to 1.

    It is `fastkv.demo.tasks.generate(task, length, seed)` with those statements moved: the same words, exactly `length`
    tokens with the answer.
    Raises: FastKVError for a depth outside of 0 to 1, a length too short, or a tokenizer of another language.
    """
    if not 0 <= depth <= 1:
        raise FastKVError(f"the depth of a needle must be from 0 to 1, got {depth}; pass a share of the text")
    try:
        told = demo.generate(task, length, seed)
    except ValueError as error:
        raise FastKVError(f"{task} cannot be written: {error}") from error
    question, reply = told.questions[0], told.answers[0]
    asked = _statements(question, reply)
    rest = [sentence for sentence in _sentences(told.context) if sentence not in asked]
    context = " ".join(scatter(rest, asked, [depth] * len(asked)))
    prompt, tokens = f"{context} {question}", len(reply.split())
    if counter(tokenizer)(prompt) + tokens != length:
        raise FastKVError(
            f"{task} is for the tokenizer of the bundled model, got one with other tokens; choose a niah task instead"
        )
    return Sample(
        task=task,
        prompt=prompt,
        context=context,
        question=question,
        answers=(reply.removesuffix(" ."),),
        tokens_to_generate=tokens,
        metadata={"units": len(rest), "needles": tuple(asked), "depths": (depth,) * len(asked)},
    )


def write_plot(found: Grid, path: str | Path, title: str = "") -> None:
    """Write the heat map as a PNG: lengths to the right, depths downwards, accuracy in every cell."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, rows = len(found.lengths), len(found.depths)
    figure = Figure(figsize=(2.6 + 0.8 * columns, 1.8 + 0.45 * rows), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    image = axis.imshow(found.accuracy, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, marks in enumerate(found.accuracy):
        for column, mark in enumerate(marks):
            colour = "black" if mark > 0.5 else "white"
            axis.text(column, row, f"{mark:.0%}", ha="center", va="center", fontsize=8, color=colour)
    axis.set_xticks(range(columns), [f"{length:,}" for length in found.lengths])
    axis.set_yticks(range(rows), [f"{depth:.0%}" for depth in found.depths])
    axis.set_xlabel("tokens of text, question and answer")
    axis.set_ylabel("depth of the needle")
    axis.set_title(title or found.task, fontsize=11)
    figure.colorbar(image, ax=axis, label=f"accuracy, {found.samples} texts a cell")
    figure.savefig(path)


def _sentences(context: str) -> list[str]:
    return [f"{sentence} ." for sentence in context.removesuffix(" .").split(" . ")]


def _statements(question: str, reply: str) -> list[str]:
    """The sentences of the text that the answer repeats, in order; `pairs` leaves their first three words out."""
    said = f"{question.partition('answer : ')[2]} {reply}".removesuffix(" .").split(" and ")
    return [f"{one} ." if one.startswith("the ") else f"the code of {one} ." for one in said]
