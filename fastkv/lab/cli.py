"""The `fastkv` command. Subcommands that measure are imported when they run, so that help and mistakes are quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import FastKVError, check_installed


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake on the command line reported as one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class LazyParser(Parser):
    """A command whose module, with `add_arguments(parser)` and `run(options)`, is imported when the command is used.

    Args: module: empty for a group of commands; extra: of the distribution, which the module needs, empty for none.
    """

    def __init__(self, *args: Any, module: str = "", extra: str = "cli", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module = module
        self.extra = extra

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the module's options, once, then parse. Raises FastKVError without the module's extra."""
        if self.module:
            if self.extra:
                check_installed("this command", self.extra)
            module = importlib.import_module(self.module, __package__)
            module.add_arguments(self)
            self.set_defaults(run=module.run)
            self.module = ""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:  # else the parser of all commands would say so, which knows none of this one's
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return options, unknown


COMMANDS: dict[str, dict[str, Any]] = {
    "demo": dict(
        module=".demo",
        help="let a model read a document once and answer questions about it, with the full cache and with smaller "
        "ones; shows answers, memory and time, and writes a picture",
        epilog="--text FILE --ask 'Who was captain of the ship?' Ahab --picture ahab.png",
    ),
    "chat": dict(
        module=".chat",
        help="talk to a model whose cache of the conversation is bounded; /stats shows what it holds",
        epilog="--model PATH --budget 1024",
    ),
    "calibrate": dict(
        help="fit what heads, VECTOR, TriAttention and quality budgets need for a model, and write it to a file",
        epilog="vector --model PATH --text corpus/ --out vector.safetensors",
    ),
    "calibrate heads": dict(
        module=".fit_heads",
        help="measure how many tokens each head needs, on text that the model generates",
        epilog="--model PATH --out heads.safetensors",
    ),
    "calibrate vector": dict(
        module=".fit_vector",
        help="fit a map from keys to values for every KV head, for correction='vector', and report its held-out R^2",
        epilog="--model PATH --text corpus/ --out vector.safetensors",
    ),
    "calibrate queries": dict(
        module=".fit_queries",
        help="measure statistics of the queries of every layer, for policy='triattention'",
        epilog="--model PATH --text corpus/ --out queries.safetensors",
    ),
    "calibrate context": dict(
        module=".fit_context",
        help="fit how the quality of answers depends on the share of a prompt that is kept, for Budget(quality=...)",
        epilog="--model PATH --policies keydiff,compactor --out calibration",
    ),
    "inspect": dict(
        module=".inspection",
        help="measure keys and values of a text: dimension, norms, directions, leverage; writes inspect.json and "
        "inspect.png",
        epilog="--model PATH --text FILE --context 2048 --out inspection",
    ),
    "fidelity": dict(
        module=".fidelity",
        help="compare attention outputs, evicted mass and next tokens of every policy and budget with the full cache, "
        "all at equal bytes; writes fidelity.json and a picture",
        epilog="--budgets 128,256 --question later --out fidelity",
    ),
    "needles": dict(
        module=".needles",
        help="hide a needle at several depths of texts of several lengths and ask for it, with the full cache and with "
        "every policy and budget; writes a JSON file and a heat map for each; a second run skips what is finished",
        epilog="--model PATH --policies keydiff,snapkv --budgets 256 --lengths 4096,16384",
    ),
    "eval": dict(
        module=".harness",
        help="run tasks of lm-evaluation-harness with the full cache and with every policy and budget; a second run "
        "skips what is finished; needs pip install 'fastkv-attn[eval]'",
        epilog="--model PATH --tasks arc_easy --policies keydiff,snapkv --budgets 256,keep=0.25",
    ),
    "bench": dict(
        module=".bench",
        help="measure time to the first token, time per token and memory of the full cache and of every policy and "
        "budget, with a checkpoint or random weights; writes bench.json and bench.png",
        epilog="--shape llama-3.1-8b --contexts 4096,16384 --budgets 512,1024 --batch 1,8",
    ),
    "view": dict(
        module=".view",
        help="write an HTML page that shows which tokens of a text caches kept: how many heads keep each token, when "
        "and how the others were evicted, and the error of attention",
        epilog="--model PATH --text FILE --policies fastkv,snapkv --budgets 256,512 --out view.html",
    ),
    "doctor": dict(
        module=".doctor",
        extra="",
        help="print versions, devices, backends and attention implementations, and why one is not available; with "
        "--model also which layers of it would be compressed, and the memory of a sequence",
        epilog="--model PATH --context 32768 --budget 1024",
    ),
}


def build_parser() -> Parser:
    """All subcommands with their options."""
    about = "A key-value cache of fixed size for Hugging Face models that remembers what it evicted."
    parser = Parser(prog="fastkv", description=about, epilog="example: fastkv demo --quick")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=LazyParser
    )
    groups = {"": commands}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        about = f"{command['help'][0].upper()}{command['help'][1:]}."
        example = f"example: fastkv {name} {command['epilog']}".rstrip()
        made = groups[group].add_parser(last, **{**command, "description": about, "epilog": example})
        if name == "calibrate":
            groups[name] = made.add_subparsers(
                title="what", dest="what", required=True, metavar="WHAT", parser_class=LazyParser
            )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's). Returns the exit code: 2 if fastkv refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = build_parser().parse_args(words)
        options.run(options)
    except FastKVError as error:
        print(f"fastkv {words[0]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
