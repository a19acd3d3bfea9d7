"""Tables and plots from perf/results/*.json; no number is typed here or there.

    python -m perf.report                       # reads and writes perf/results
    python -m perf.report --results build/run    # the files of another run
    python -m perf.report --readme              # and docs/performance.md, and the README's tables and picture

Writes README.md and PNG plots beside the files. What was not measured says so; its target is then marked as such and
its prediction as a prediction. Files of dry runs are ignored.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import front
from .engine import RESULTS
from .gpu import report as gpu
from .speed.report import chapter, write_section
from .tables import read, table

HEADER = """# Measurements

Written by `python -m perf.report` from the JSON files beside it; do not edit. How: [../README.md](../README.md).
"""
FACTS = ("device", "cpu", "driver", "cuda", "torch", "triton", "transformers", "python", "threads", "commit", "source")


def environments(files: dict[str, dict[str, Any]]) -> str:
    """What each file was measured on."""
    known = {}
    for name, file in files.items():
        if "environment" in file:
            code = ", ".join(dict.fromkeys(row["source"] for row in file["rows"] if "source" in row))
            known[name] = {"source": code, **file["environment"]}
    rows = [[f"{name}.json", *(str(facts.get(fact, "")) for fact in FACTS)] for name, facts in known.items()]
    return table(("file", *FACTS), rows) or "Nothing has been measured.\n"


COUNTED = """
## Decode steps, counted

One token of one sequence, the default policy, one step in 16 evicting. "captured" is the eager step in a CUDA graph,
"inductor" a compiled one, "combo kernels" inductor with that option, "frozen" with `freezing` as well, which makes one
product of those that have the same row. Kernels and bytes are counted (`perf.step_count`); milliseconds are a
prediction, as is how far above the floor, all weights and the cache read once, steps of so many sequences are. Frozen,
Llama, Qwen3-8B and Gemma 3 are predicted to be within 1.35 of it. Qwen3-4B has as many layers as Qwen3-8B over half the
bytes: it launches 9 kernels a layer, 4 of them products with weights, and 1.35 leaves 7.7.

"""


def counted(file: dict[str, Any] | None) -> str:
    """What inductor leaves of a step."""
    if file is None:
        return ""
    batches = [*file["rows"][0]["predicted_over_floor"]]
    rows = [
        (
            *(row["title"], row["way"], f"{row['launches']:.0f}", f"{row['bytes'] / 1e9:.2f}"),
            *(f"{row['floor_bytes'] / 1e9:.2f}", f"{row['predicted_us'] / 1e3:.2f} (prediction)"),
            *(f"{over:.2f} (prediction)" for over in row["predicted_over_floor"].values()),
        )
        for row in file["rows"]
    ]
    over = [f"over the floor, B={batch}" for batch in batches]
    return COUNTED + table(("model", "step", "kernels", "GB", "floor, GB", "ms", *over), rows)


CODED = """
## Slots of 8 and 4 bits on a CPU

A layer's step and prompt with slots of so many bits over those with slots in the model's dtype, the same tokens, in
turn in one process (`python -m perf.slot_steps`): {machine}; {threads} thread; commit {commit}. Quantiles at 20 and
80 % over {rounds} eviction periods.

"""


def coded(file: dict[str, Any] | None) -> str:
    """What slots of codes cost a CPU."""
    if file is None:
        return ""
    formats, rows = [*file["rows"][0]["step"]], []
    for row in file["rows"]:
        shape, step = row["shape"], row["step"]
        sizes = f"{shape['batch']} x {shape['queries']} / {shape['heads']} x {shape['dim']}"
        ratios = [f"{step[name]['p50']:.2f} ({step[name]['p20']:.2f}-{step[name]['p80']:.2f})" for name in formats]
        rows.append(
            (
                *(sizes, str(shape["kept"]), shape["dtype"], row["policy"], f"{row['step_us']:.0f}", *ratios),
                *(f"{row['prompt_ms']:.0f}", *(f"{row['prompt'][name]:.2f}" for name in formats)),
            )
        )
    facts, settings = file["environment"], file["settings"]
    head = CODED.format(machine=f"{facts['cpu']}, torch {facts['torch']}", commit=facts["commit"], **settings)
    sizes = ("batch x heads x numbers", "kept", "dtype", "policy")
    prompts = ("prompt, ms", *(f"prompt, {name}" for name in formats))
    return head + table((*sizes, "step, us", *formats, *prompts), rows)


def write(folder: Path) -> Path:
    """Write the report of the folder's files. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    files = read(folder)
    unfinished = [name for name, file in files.items() if file.get("complete") is False]
    parts = [
        HEADER,
        chapter(files, folder),
        gpu.promises(files),
        f"\nFiles that are not finished: {', '.join(unfinished)}.\n" if unfinished else "",
        "\n## Measured on\n\n",
        environments(files),
        gpu.chapters(files),
        counted(files.get("step_count")),
        coded(files.get("slot_steps")),
    ]
    drawn = gpu.plots(folder, gpu.timed(files))
    path = folder / "README.md"
    path.write_text("".join(parts) + (f"\n## Plots\n\n{drawn}" if drawn else ""))
    return path


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read and write (default perf/results)")
    parser.add_argument(
        "--readme", action="store_true", help="write docs/performance.md and what README.md shows as well"
    )
    options = parser.parse_args(arguments)
    print(write(options.results))
    if options.readme:
        write_section(read(options.results))
        front.write()


if __name__ == "__main__":
    main()
