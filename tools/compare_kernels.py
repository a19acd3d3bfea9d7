"""Do two trees compile every kernel to the same code? A digest of the PTX (AMD: GCN) of each variant of `perf.aot`.

    python tools/compare_kernels.py write before.json --tree ../fastkv-before
    python tools/compare_kernels.py write after.json
    python tools/compare_kernels.py diff before.json after.json

Lines of the source do not take part (TRITON_DISABLE_LINE_INFO), so that a kernel may move. Needs no GPU and not ptxas;
780 variants take about 20 minutes on one core. `diff` exits with 1 if a variant that both trees have differs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

CHIPS = {"80": ("cuda", 80, 32), "90": ("cuda", 90, 32), "100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
TEXT = ("ptx", "amdgcn")  # the last stage that is text; what follows depends on it alone


def code_of(variant: Any, chip: str, stages: Any) -> str:
    """The text a variant compiles to for a chip."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget(*CHIPS[chip])
    names = variant.kernel.arg_names
    constants = {name: variant.constants.get(name) for name in names if name not in variant.types}
    constants |= {"INTERP": False} if "INTERP" in constants else {}
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    hinted = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in variant.div16]
    hints = {(i,): [["tt.divisibility", 16]] for i in hinted}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=hints)
    depth = stages(variant.num_stages, hip=target.backend == "hip")
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": variant.num_warps, "num_stages": depth} | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata: dict[str, Any] = {"target": target, **options.__dict__}
    passes: dict[str, Any] = {}
    backend.add_stages(passes, options, source.language)
    for name, run in passes.items():
        module = run(module, metadata)
        if name in TEXT:
            return str(module)
    raise RuntimeError(f"none of {', '.join(TEXT)} among the stages {', '.join(passes)}")


def variants_of(kernels: Any) -> list[Any]:
    """All variants of the tree that is imported; until there was `perf.variants`, each kernel module had its own."""
    if importlib.util.find_spec("perf.variants"):
        return [v for some in importlib.import_module("perf.variants").AOT.values() for v in some]
    names = [m.name for m in pkgutil.iter_modules(kernels.__path__) if not m.name.startswith("_")]
    return [v for name in names for v in getattr(importlib.import_module(f"fastkv.kernels.{name}"), "AOT", ())]


def write(file: Path, tree: Path, archs: list[str]) -> None:
    """Digests of all variants of a tree, added to what the file has."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # read when triton is imported
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(tree.resolve()))
    kernels = importlib.import_module("fastkv.kernels")
    if not Path(kernels.__path__[0]).is_relative_to(tree.resolve()):
        raise SystemExit(f"imported {kernels.__path__[0]}, which is not in {tree}; uninstall that one or change --tree")
    stages = next(
        module.stages
        for name in ("_launch", "_tiles")
        if importlib.util.find_spec(f"fastkv.kernels.{name}")
        for module in [importlib.import_module(f"fastkv.kernels.{name}")]
        if hasattr(module, "stages")
    )
    found: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    variants = variants_of(kernels)
    wanted = [(v, chip) for v in variants for chip in archs if not v.arches or chip in v.arches]
    for number, (variant, chip) in enumerate(wanted, 1):
        key = f"{variant.kernel.__name__} | {variant.name} | {chip}"
        if key in found:
            continue
        found[key] = hashlib.sha256(code_of(variant, chip, stages).encode()).hexdigest()
        print(f"{number}/{len(wanted)} {found[key][:12]} {key}", flush=True)
        file.write_text(json.dumps(found, indent=1))


def diff(before: Path, after: Path) -> int:
    """Print what differs. Returns: 1 if a variant of both does."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    changed = [key for key in old if key in new and old[key] != new[key]]
    for title, keys in (
        ("differs", changed),
        ("only before", sorted(old.keys() - new.keys())),
        ("only after", sorted(new.keys() - old.keys())),
    ):
        for key in keys:
            print(f"{title}: {key}")
    print(f"{len(old.keys() & new.keys()) - len(changed)} the same, {len(changed)} differ")
    return 1 if changed else 0


def main() -> int:
    """Returns: the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write", help="digests of one tree; goes on where it was interrupted")
    writer.add_argument("file", type=Path)
    writer.add_argument("--tree", type=Path, default=Path(__file__).parent.parent)
    writer.add_argument("--arch", choices=[*CHIPS, "all"], default="all")
    differ = commands.add_parser("diff", help="compare two files of digests")
    differ.add_argument("before", type=Path)
    differ.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "diff":
        return diff(options.before, options.after)
    write(options.file, options.tree, list(CHIPS) if options.arch == "all" else [options.arch])
    return 0


if __name__ == "__main__":
    sys.exit(main())
