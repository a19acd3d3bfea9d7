"""`python -m fastkv.evaluation ...`: the command line of lm-evaluation-harness, to which the model "fastkv" is known.

All flags are the harness's own:

    python -m fastkv.evaluation --model fastkv --tasks arc_easy,wikitext \\
        --model_args pretrained=PATH,policy=momentkv,budget=512,prefill_block=256
    accelerate launch -m fastkv.evaluation --model fastkv ...      # one process for each GPU, on one or several nodes
"""

from __future__ import annotations

import sys

from ..errors import FastKVError
from . import _check_harness


def main() -> int:
    """Run the harness on this process's command line. Returns the exit code: 2 if fastkv refused."""
    try:
        _check_harness()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except FastKVError as error:
        print(f"fastkv.evaluation: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
