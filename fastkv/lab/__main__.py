"""`python -m fastkv.lab ...`: the command line of lm-evaluation-harness, which knows the model "fastkv" and the
tasks "fastkv_ruler...".

All flags are the harness's own:

    python -m fastkv.lab --model fastkv --tasks arc_easy,wikitext \\
        --model_args pretrained=PATH,policy=momentkv,budget=512,prefill_block=256
    accelerate launch -m fastkv.lab --model fastkv ...      # one process for each GPU, on one or several nodes

Without GPUs, accelerate starts several processes with `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu
--num_processes 2 -m fastkv.lab ...`; with --cpu it starts one, whatever their number.
"""

from __future__ import annotations

import sys

from ..errors import FastKVError, check_installed
from .harness import ADVICE, NEEDS, TASK_FILES
from .pretrained import first_line


def main() -> int:
    """Run the harness on this process's command line. Returns the exit code: 2 if fastkv refused."""
    try:
        check_installed(*NEEDS)
        run()
    except FastKVError as error:
        print(f"fastkv.lab: {error}", file=sys.stderr)
        return 2
    return 0


def run() -> None:
    """What `lm_eval` does, with fastkv's tasks beside those of --include_path."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    from . import plugins  # noqa: F401  (what the harness calls "fastkv")

    setup_logging()
    harness = HarnessCLI()
    options = harness.parse_args()
    if hasattr(options, "include_path"):
        own = options.include_path
        if own is None and getattr(options, "config", None):  # a file of options, which the command line overrides
            own = EvaluatorConfig.load_yaml_config(options.config).get("include_path")
        options.include_path = [str(TASK_FILES), *([own] if isinstance(own, str) else own or [])]
    try:
        harness.execute(options)
    except (ConnectionError, FileNotFoundError) as error:  # what `datasets` raises without a connection or a file
        raise FastKVError(f"something to read is missing ({first_line(error)}); {ADVICE}") from error


if __name__ == "__main__":
    raise SystemExit(main())
