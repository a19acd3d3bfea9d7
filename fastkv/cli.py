"""The `fastkv` command. Each subcommand imports what it needs when it runs, so that help and mistakes are quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake on the command line reported as one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class LazyParser(Parser):
    """A command whose module, with `add_arguments(parser)` and `run(options)`, is imported when the command is used."""

    def __init__(self, *args: Any, module: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the module's options, once, then parse."""
        if self.module:
            module = importlib.import_module(self.module, __package__)
            module.add_arguments(self)
            self.set_defaults(run=module.run)
            self.module = ""
        return super().parse_known_args(args, namespace)


def build_parser() -> Parser:
    """All subcommands with their options."""
    parser = Parser(
        prog="fastkv",
        description="A key-value cache of fixed size for Hugging Face models that remembers what it evicted.",
        epilog="example: fastkv demo --quick",
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=LazyParser
    )

    commands.add_parser(
        "demo",
        module=".evaluation.demo",
        help="ask the bundled model questions over long texts, with the full cache and with every policy",
        description="Ask the bundled model questions over long generated texts, with the full cache and with "
        "compressed caches of several sizes. Prints a table and writes demo.json and demo.png.",
        epilog="example: fastkv demo --context 2048 --budgets 96,192 --policies momentkv,snapkv --out results",
    )
    calibrate = commands.add_parser(
        "calibrate",
        help="fit what VECTOR and quality budgets need to know of a model",
        description="Fit what VECTOR and quality budgets need to know of a model, and write it to a file.",
        epilog="example: fastkv calibrate vector --model PATH --text corpus/ --out vector.safetensors",
    )
    kinds = calibrate.add_subparsers(title="what", dest="what", required=True, metavar="WHAT", parser_class=LazyParser)
    kinds.add_parser(
        "vector",
        module=".calibration.fit_vector",
        help="maps from keys to values, for correction='vector'",
        description="Fit a linear map from keys to values for every KV head, and report its held-out R^2.",
        epilog="example: fastkv calibrate vector --model PATH --text corpus/ --out vector.safetensors",
    )
    kinds.add_parser(
        "context",
        module=".calibration.fit_context",
        help="how much of a prompt a quality needs, for Budget(quality=...)",
        description="Fit how the quality of answers falls with the share of the context that is kept, for each policy.",
        epilog="example: fastkv calibrate context --model PATH --policies keydiff,compactor --out calibration",
    )
    commands.add_parser(
        "inspect",
        module=".evaluation.inspection",
        help="what a model's keys look like, and which policy that suits",
        description="Measure the keys and values a model makes of a text: intrinsic dimension, norms, similarity to "
        "the mean key, and how that dilutes with the length of the text. Writes inspect.json and inspect.png.",
        epilog="example: fastkv inspect --model demo --text demo --context 2048 --out inspection",
    )
    commands.add_parser(
        "fidelity",
        module=".evaluation.fidelity",
        help="how close every policy comes to the full cache on a text, at equal bytes",
        description="Compare attention outputs, evicted mass and next tokens of every policy and budget with the full "
        "cache, all at equal bytes. Writes fidelity.json and a picture.",
        epilog="example: fastkv fidelity --model demo --budgets 128,256 --seeds 5 --out fidelity",
    )

    commands.add_parser(
        "needles",
        module=".evaluation.needles",
        help="what is found in a text, by its depth and the length of the text, as heat maps",
        description="Hide a needle at every depth of texts of every length and ask for it, with the full cache and "
        "with every policy and budget. Writes a JSON file and a heat map for each; what is finished is kept and "
        "skipped the next time.",
        epilog="example: fastkv needles --model PATH --policies keydiff,snapkv --budgets 256 --lengths 4096,16384",
    )
    commands.add_parser(
        "eval",
        module=".evaluation.harness",
        help="lm-evaluation-harness tasks with the full cache and with policies and budgets",
        description="Run tasks of the lm-evaluation-harness with the full cache and with every policy and budget; what "
        "is finished is kept and skipped the next time. Needs pip install fastkv[eval].",
        epilog="example: fastkv eval --model PATH --tasks arc_easy --policies keydiff,snapkv --budgets 256,keep=0.25",
    )

    doctor = commands.add_parser(
        "doctor",
        help="print versions, devices and backends, and why one is not available",
        description="Print the versions of what fastkv builds on, the devices, the backends and attention "
        "implementations that can be used here, and for each that cannot, why.",
        epilog="example: fastkv doctor",
    )
    doctor.set_defaults(run=run_doctor)
    return parser


def run_doctor(options: argparse.Namespace) -> None:
    """`fastkv doctor`."""
    for title, lines in (
        ("versions", versions()),
        ("devices", devices()),
        ("backends", backends()),
        ("attention implementations", attention_implementations()),
    ):
        print(title)
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(f"  {name:<{width}}  {text}")


def versions() -> list[tuple[str, str]]:
    """Python and the packages fastkv builds on, with the installed version."""
    import importlib.metadata
    import platform

    from . import __version__

    found = [("python", platform.python_version()), ("fastkv", __version__)]
    for package in ("torch", "triton", "transformers", "numpy", "flash-attn"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        found.append((package, version))
    return found


def devices() -> list[tuple[str, str]]:
    """The CPU and every GPU that torch sees."""
    import platform

    import torch

    found = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        found.append((f"cuda:{index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"))
    return found


def backends() -> list[tuple[str, str]]:
    """What can compute fastkv's operations here, and why the rest cannot."""
    import torch

    from .backend import MODULES, why_not

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"reference": "plain torch, any device", "cpu": "torch's fused attention", "triton": "the kernels"}
    problems = {name: why_not(name, torch.device("cpu") if name == "cpu" else device) for name in MODULES}
    return [(name, f"not available: {why}" if why else f"available ({about[name]})") for name, why in problems.items()]


def attention_implementations() -> list[tuple[str, str]]:
    """What a model may be loaded with before `fastkv.patch`, and why the rest may not."""
    import importlib.util

    import torch

    flash = "available" if torch.cuda.is_available() else "not available: torch sees no CUDA device"
    if importlib.util.find_spec("flash_attn") is None:
        flash = "not available: flash-attn is not installed (pip install fastkv[flash])"
    sdpa = "available (not for Gemma 2, whose logit soft-cap it ignores)"
    return [("eager", "available"), ("sdpa", sdpa), ("flash_attention_2", flash)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's). Returns the exit code: 2 if fastkv refused."""
    options = build_parser().parse_args(arguments)

    from .errors import FastKVError

    try:
        options.run(options)
    except FastKVError as error:
        print(f"fastkv {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
