"""The `fastkv` command: every subcommand and its options.

What a subcommand runs is imported once its options are right, so that help and mistakes need no torch.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from ..errors import FastKVError, check_installed, out_of_memory

MADE: list[Path] = []  # folders of this run, those inside first; what is empty at its end goes again
SHORTEST = 96  # tokens of a text, at least
LARGEST = 2**32 - 1  # number that an option takes: the largest seed of numpy
ASK: Any = ("QUESTION", "ANSWER")
SLOTS = ("auto", "model", "int8", "fp8", "int4", "k8v4")
COMPARED = ("fastkv", "momentkv", "keydiff", "snapkv", "kvzip", "streaming")
NEEDLES = tuple(f"niah_{kind}" for kind in "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3".split())
NEEDLES += ("niah_multivalue", "niah_multiquery")


def reader(kind: Callable[[str], Any], several: bool, least: float | None) -> Callable[[str], Any]:
    """How argparse reads a value, or `a,b` as a tuple that has each once."""

    def parse(text: str) -> Any:
        parts = [part.strip() for part in text.split(",") if part.strip()] if several else [text]
        try:
            found = tuple(dict.fromkeys(map(kind, parts)))
        except ValueError:
            what = f"{'whole ' * (kind is int)}numbers separated by commas" if several else "a number"
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None
        if not found:
            raise argparse.ArgumentTypeError("must name at least one, got none; leave it out to use the default")
        low = -LARGEST if least is None else least
        for one in found:
            if isinstance(one, (int, float)) and not low <= one <= LARGEST:  # nor is what is no number
                raise argparse.ArgumentTypeError(f"must be at least {low:g} and at most {LARGEST}, got {one}")
        return found if several else found[0]

    return parse


def block(text: str) -> int | str | None:
    """Tokens of a block as `fastkv.patch` takes them, None for "whole"."""
    if text in ("auto", "whole"):
        return None if text == "whole" else text
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be whole, auto or a number of at least 2 tokens, got {text!r}")
    return int(text)


Option: TypeAlias = tuple[list[str], dict[str, Any]]  # arguments of argparse's `add_argument`


def option(
    names: str,
    default: Any,
    help: str,
    metavar: str = "N",
    least: float | None = None,
    kind: Callable[[str], Any] | None = None,
    **more: Any,
) -> Option:
    """An option of a command.

    Args: names: one or several.  default: of the kind that the option has, a tuple for a list; a type where there is no
        default, False for a flag.  help: names the default by itself.  least: of numbers.  kind: how a value is read,
        if not by the type of the default.  more: for argparse.
    """
    several = isinstance(default, tuple)
    one, *_ = given = default if several else (default,)
    if one is False:
        return names.split(), {"action": "store_true", "help": help}
    known = None if isinstance(one, type) else default
    shown = ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in given)
    settings: dict[str, Any] = {"default": known, "help": f"{help} (default: {shown})" if known else help}
    if "choices" not in more:
        settings["metavar"] = f"{metavar},..." if several else metavar
    if not isinstance(one, list):
        settings["type"] = reader(kind or (one if isinstance(one, type) else type(one)), several, least)
    return names.split(), {**settings, **more}


MODEL_IS = "smollm2 (SmolLM2-135M-Instruct, extra real), a folder, a .gguf file or a name on a hub"
TEXTS = "a text in UTF-8, - for standard input, or topics, library, code, which come with Python"
MODEL = option("--model", "smollm2", MODEL_IS, "PATH")
TEXT = option("--text", "topics", TEXTS, "FILE")
EQUAL_IS = (
    "what a budget in tokens means: the bytes of so many keys and values, so that a policy that stores more keeps "
    "fewer tokens, or tokens"
)
EQUAL = option("--equal", "bytes", EQUAL_IS, choices=("bytes", "tokens"))
SLOTS_ARE = option("--slots", "model", "how keys and values are stored, as in fastkv.patch", choices=SLOTS)
CORRECTION = option("--correction", "auto", "of all policies, as in fastkv.patch; auto is the policy's own", "NAME")
MODE_IS = (
    "log-likelihoods: stream reads the whole text in blocks, prefix compresses the context before it scores the "
    "continuation; auto is stream with --prefill-block, prefix without"
)
QUESTION_IS = (
    "later: the text is read, and compressed, before the question is known; seen: text and question are read together"
)
LATER: Any = {"choices": ("later", "seen")}
CACHES = (
    option("--policies --policy", ("fastkv", "momentkv", "keydiff"), "policies to compare", "NAME"),
    option("--budgets --budget", ("128", "256"), "tokens per KV head, or 16x, keep=X, bytes=N, quality=X"),
    EQUAL,
    option("--sinks", 4, "first tokens that stay"),
    option("--recent", 32, "last tokens that stay"),
    option("--layers", "uniform", "how layers share", choices=("uniform", "pyramid")),
    option("--heads", "calibrated", "as in fastkv.Budget: calibrated, uniform, adaptive or a file", "HOW"),
    option("--prefill-block", int, "tokens of a block (default: prompts are read whole)"),
    option("--evict-every", 16, "decode steps between evictions"),
    CORRECTION,
    SLOTS_ARE,
)


def out(path: str, what: str = "directory to write to", metavar: str = "DIR") -> Option:
    """What is written."""
    return option("--out", Path(path), what, metavar)


def corpus(path: str) -> tuple[Option, ...]:
    """The options of what is fitted to text."""
    return (
        MODEL,
        out(path, "file to write", "FILE"),
        option("--text", "topics", f"{TEXTS}, or a folder of .txt and .md files", "PATH"),
        option("--length", 2048, "tokens of a sequence", least=2),
        option("--tokens", 200_000, "tokens in all"),
    )


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes: help.  example: its arguments.  options.  module: in which `run(options)` is, or the function that is
        named; empty for a group of commands.  extra: of the distribution, which it needs; empty for none.
    """

    help: str
    example: str
    options: tuple[Option, ...]
    module: str
    extras: tuple[str, ...]


COMMANDS: dict[str, Command] = {}


def command(
    name: str, help: str, example: str, *options: Option, module: str = "", extras: tuple[str, ...] = ("cli",)
) -> None:
    """Let there be a subcommand."""
    COMMANDS[name] = Command(help, example, options, module, extras)


command(
    "demo",
    "let a model read a document once and answer questions about it, with the full cache and with smaller ones; "
    "shows answers, memory and time, and writes a picture",
    "--text FILE --ask 'Who was captain of the ship?' Ahab --picture ahab.png",
    MODEL,
    option("--text", str, "topics, library or code of Python, or a file in UTF-8, with --ask", "FILE"),
    option("--ask", [], "a question, and what its answer must contain; may be repeated", ASK, nargs=2, action="append"),
    option("--context", 6400, "tokens that are read, at most", least=SHORTEST),
    option("--budgets", ("4x", "8x", "16x"), "budgets of the smaller caches, as in fastkv.patch", "SIZE"),
    option("--picture", Path("fastkv-demo.png"), "picture to write, PNG or SVG", "FILE"),
    option("--quick", False, "a shorter run: 1024 tokens, the first smaller cache"),
    module=".demo",
)
command(
    "chat",
    "talk to a model whose cache of the conversation is bounded; /stats shows what it holds",
    "--model PATH --budget 1024",
    MODEL,
    option("--policy", "fastkv", "policy", "NAME"),
    option("--budget", "1024", "tokens per KV head, or bytes=N"),
    option("--words", 256, "tokens of an answer, at most", least=1),
    module=".chat",
)
command(
    "calibrate",
    "fit what heads, VECTOR, TriAttention and quality budgets need for a model, and write it to a file",
    "vector --model PATH --text corpus/ --out vector.safetensors",
)
command(
    "calibrate heads",
    "measure how many tokens each head needs, on text that the model generates",
    "--model PATH --out heads.safetensors",
    MODEL,
    out("heads.safetensors", "file to write", "FILE"),
    option("--text", str, "file to read instead of text that the model generates", "FILE"),
    option("--seed", 0, "seed of the text"),
    module=".fits:run_heads",
)
command(
    "calibrate vector",
    "fit a map from keys to values for every KV head, for correction='vector', and report its held-out R^2",
    "--model PATH --text corpus/ --out vector.safetensors",
    *corpus("vector.safetensors"),
    option("--boundary", 1.0, "importance at the edge of eviction over the mean of what stays", "S"),
    option("--joint", False, "one map for all heads of a layer, as in the paper; they keep the same tokens"),
    module=".fits:run_vector",
)
command(
    "calibrate queries",
    "measure statistics of the queries of every layer, for policy='triattention'",
    "--model PATH --text corpus/ --out queries.safetensors",
    *corpus("queries.safetensors"),
    module=".fits:run_queries",
)
command(
    "calibrate context",
    "fit how the quality of answers depends on the share of a prompt that is kept, for Budget(quality=...)",
    "--model PATH --policies keydiff,compactor --out calibration",
    MODEL,
    out("."),
    CACHES[0],
    option("--samples", 12, "texts of each length", least=1),
    option("--lengths", (256, 512, 1024), "tokens of the texts", least=SHORTEST),
    option("--seed", 0, "seed of the first text"),
    option("--penalty", 2.0, "weight of too high predictions, relative to too low ones", "W", least=0.01),
    module=".fits:run_context",
)
command(
    "inspect",
    "measure the keys of a text: dimension, norms, similarity to their mean; writes inspect.json",
    "--model PATH --text FILE --context 2048 --out inspection",
    MODEL,
    out("fastkv-inspect"),
    TEXT,
    option("--context", int, "tokens to read (default: all of the text up to 2048)", least=256),
    module=".inspection",
)
command(
    "fidelity",
    "compare attention outputs, evicted mass and next tokens of every policy and budget with the full cache, all "
    "at equal bytes; writes fidelity.json",
    "--budgets 128,256 --question later --out fidelity",
    MODEL,
    out("fastkv-fidelity"),
    TEXT,
    option(
        "--question", str, f"{QUESTION_IS}; the text then hides a fact, and what the full cache answers is fed", **LATER
    ),
    option("--context", 1024, "tokens of a text", least=SHORTEST),
    option("--steps", 48, "last tokens of it that are fed one at a time", "T", least=2),
    option("--policies --policy", COMPARED, "policies to compare", "NAME"),
    option("--budgets --budget", (128, 256), "sizes of the cache, tokens per KV head"),
    EQUAL,
    CORRECTION,
    SLOTS_ARE,
    option("--seeds", 3, "number of texts, each another part of --text", "K", least=1),
    module=".fidelity",
)
command(
    "needles",
    "hide a needle at several depths of texts of several lengths and ask for it, with the full cache and with "
    "every policy and budget; writes a JSON file and a heat map for each; a second run skips what is finished",
    "--model PATH --policies keydiff,snapkv --budgets 256 --lengths 4096,16384",
    MODEL,
    out("fastkv-needles"),
    option("--task", "niah_single_2", f"what is hidden and asked for: {', '.join(NEEDLES)}", "NAME"),
    option("--question", "later", QUESTION_IS, **LATER),
    *CACHES,
    option("--lengths", (512, 1024, 2048), "tokens of the texts"),
    option("--depths", (0.0, 0.25, 0.5, 0.75, 1.0), "places of the needle, 0 to 1", "X"),
    option("--samples", 5, "texts for each length and depth", least=1),
    option("--seed", 0, "seed of the texts"),
    module=".needles",
)
command(
    "eval",
    "run tasks of lm-evaluation-harness with the full cache and with every policy and budget; a second run skips "
    "what is finished; needs pip install 'fastkv-attn[eval]'",
    "--model PATH --tasks arc_easy --policies keydiff,snapkv --budgets 256,keep=0.25",
    MODEL,
    out("fastkv-eval"),
    option("--tasks", (str,), "tasks of the harness or in --include-path, or YAML files", "NAME", required=True),
    *CACHES,
    option("--mode", "auto", MODE_IS, choices=("auto", "stream", "prefix")),
    option("--question", "seen", f"{QUESTION_IS}, for tasks that name it, as fastkv's do", **LATER),
    option("--limit", float, "number of questions of each task, or below 1 their share", least=1e-9),
    option("--num-fewshot", int, "worked examples in each prompt", least=0),
    option("--batch-size", "1", "sequences in a batch, or auto"),
    option("--seed", 0, "seed of examples and sampling", least=0),
    option("--device", str, "default: the GPU if there is one", "NAME"),
    option("--model-args", "", "more arguments of the harness's own model, as dtype=bfloat16", "K=V,..."),
    option("--metadata", [], "of tasks, as max_seq_lengths=[4096,8192] num_samples=20", "K=V", nargs="+"),
    option("--include-path", str, "folder with task YAML files of your own", "DIR"),
    module=".harness",
    extras=("cli", "eval"),
)
command(
    "bench",
    "measure time to the first token, time per token and memory of the full cache and of every policy and budget; "
    "writes bench.json",
    "--model PATH --contexts 4096,16384 --budgets 512,1024 --batch 1,8",
    MODEL,
    option("--contexts --context", (1024, 4096), "tokens of the prompts", least=2),
    option("--budgets --budget", ("512",), "tokens per KV head, or 16x, keep=X, bytes=N"),
    option("--batch", (1,), "sequences", least=1),
    option("--policies --policy", ("fastkv", "momentkv", "keydiff"), "policies to compare", "NAME"),
    option("--prefill-block", "auto", "tokens of a block in which compressed caches read, or whole", kind=block),
    option("--graphs", False, "decode steps as CUDA graphs, of the full cache, too"),
    SLOTS_ARE,
    option("--rounds", 3, "how often every cache is measured", least=1),
    option("--minutes", 2.0, "stop after about so many minutes", "M", least=0.01),
    out("fastkv-bench"),
    module=".bench",
)
command(
    "view",
    "write an HTML page that shows which tokens of a text caches kept: how many heads keep each token, when and "
    "how the others were evicted, and the error of attention",
    "--model PATH --text FILE --policies fastkv,snapkv --budgets 256,512 --out view.html",
    MODEL,
    out("fastkv-view.html", "page to write", "FILE"),
    option("--text", "facts", f"{TEXTS}, or facts, topics with facts, a question and its answer", "FILE"),
    option("--seed", 0, "seed of the facts"),
    option("--context", int, "tokens of the text (default: all of it, at most 4096)", least=SHORTEST),
    option("--policies --policy", ("fastkv", "snapkv", "keydiff", "streaming"), "policies", "NAME"),
    option("--budgets --budget", (256, 512), "sizes of the cache, tokens per KV head"),
    EQUAL,
    SLOTS_ARE,
    option("--prefill-block", "auto", "tokens of a block (auto: 256), or whole", kind=block),
    option("--steps", int, "last tokens that are fed one at a time (default: the answer, or 32)", least=1),
    module=".view",
)
command(
    "doctor",
    "print versions, devices and backends, and why one is not available; with --model which layers of it would be "
    "compressed, and the memory of a sequence",
    "--model PATH --context 32768 --budget 1024",
    option("--model", str, "smollm2, a directory or a .gguf file; only the config is read", "PATH"),
    option("--context", 32768, "tokens of a sequence", least=1),
    option("--budget", "1024", "tokens kept per KV head, or how many times smaller, as 16x", "SIZE"),
    option("--slots", "auto", "how keys and values are stored", choices=SLOTS),
    option("--policy", "fastkv", "policy", "NAME"),
    module=".doctor",
    extras=(),
)


class Parser(argparse.ArgumentParser):
    """argparse, with a mistake on the command line reported as one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and report what is unknown: the parser of all commands would not say to which it was given."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return options, unknown


def build_parser() -> Parser:
    """All subcommands with their options."""
    about = "A key-value cache of fixed size for Hugging Face models that remembers what it evicted."
    parser = Parser(prog="fastkv", description=about, epilog="example: fastkv demo --quick")
    groups = {"": parser.add_subparsers(title="commands", required=True, metavar="COMMAND")}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        about = f"{command.help[0].upper()}{command.help[1:]}."
        made = groups[group].add_parser(
            last, help=command.help, description=about, epilog=f"example: fastkv {name} {command.example}"
        )
        if not command.module:
            groups[name] = made.add_subparsers(title="what", required=True, metavar="WHAT")
        for names, settings in command.options:
            made.add_argument(*names, **settings)
        made.set_defaults(command=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's). Returns the exit code: 2 if fastkv refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a terminal cannot show is no reason to stop
            stream.reconfigure(errors="replace")
    try:
        options = build_parser().parse_args(words)
        command: Command = options.command
        for extra in command.extras:
            check_installed("this command", extra)
        module, _, function = command.module.partition(":")
        getattr(importlib.import_module(module, __package__), function or "run")(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # of an output that nobody reads, as behind | head, or that has no room
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"fastkv {words[0]}: the output cannot be written ({error.strerror})", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the rest goes at exit
        return 1
    except FastKVError as error:
        print(f"fastkv {words[0]}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        print(f"fastkv {words[0]}: out of memory; ask for less or choose a smaller model", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fastkv {words[0]}: interrupted", file=sys.stderr)
        return 130
    finally:
        while MADE:
            with suppress(OSError):
                MADE.pop(0).rmdir()
    return 0


if __name__ == "__main__":
    raise SystemExit(importlib.import_module("fastkv.lab.cli").main())  # once: the other modules import this one
