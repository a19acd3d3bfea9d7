"""How many sequences fit into the same memory, with vLLM's own cache and with compressed ones: vLLM's own numbers.

    python -m perf.serving_fit                          # SmolLM2 at 16,384 tokens: 4,096 or 1,024 kept, in int8
    python -m perf.serving_fit --model DIR --budgets 2048 --output /tmp/fit

Engines are started and asked nothing, each in a process of its own. Needs vLLM's environment (.venv-vllm/bin/python),
and SmolLM2, which any other command unpacks, or --model DIR. Writes fit.json and fit.md.
"""

import json
from pathlib import Path

from .serving import engine_of, fitting, in_process, parse, write


def main(arguments: list[str] | None = None) -> None:
    """Start all engines, one after the other; an engine's name is its budget, "0" for vLLM's own cache."""
    how = {
        "length": 16384,
        "budgets": ["4096", "4096:centroids:64", "4096:none", "1024"],
        "slots": "int8",
        "cache_mib": 8192,
    }
    options = parse("perf.serving_fit", __doc__, arguments, **how)
    if options.engine:
        budget, _, correction = options.engine.partition(":")
        ours = {"budget": int(budget), "slots": options.slots, "correction": correction or "auto", "prefill_block": 512}
        how = {"dtype": "bfloat16", "hf_overrides": {"max_position_embeddings": options.length}, "enforce_eager": True}
        made = engine_of(options, options.length, 16, ours if ours["budget"] else {}, **how)
        print(json.dumps(fitting(made, options.length, ours["budget"] > 0)))
        return
    rows = [{"budget": one, "fit": in_process("perf.serving_fit", arguments, one)} for one in ("0", *options.budgets)]
    write(options.output / "fit.json", options, rows, Path(__file__).with_suffix(".jinja"))


if __name__ == "__main__":
    main()
