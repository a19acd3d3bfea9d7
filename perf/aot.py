"""Compile every kernel and variant ahead of time and check what it costs; needs no GPU.

    python -m perf.aot --arch 90            one line per variant: registers, spills, shared memory, CTAs per SM, loads
    python -m perf.aot --arch all --match decode_attention
    python -m perf.aot --sample             one variant of every kernel function
    python -m perf.aot --arch all --table perf/results/aot_triton-3.7.1.txt
                                            bring a table up to date: compile what has changed since it was written

A variant fails if it spills more than 16 bytes, loads 2 bytes at a time, has no 16-byte loads although they are
expected, needs more shared memory than the chip has, takes a ticket before all threads' stores are done (on AMD a
barrier alone does not wait for them) or none where it should, has a barrier on AMD that waits for no stores, computes a
product in several warps where one should, or has so few instructions that the compiler has dropped the work. Uses the
tools in the triton wheel. The variants are what recorded launches would compile, see `perf.variants`.

`ir` in a line is a digest of what the compiler is given: Triton's IR, inlined and without places in the source, the
chip, warps and stages. While it is the same, with the same triton, so is the line.
"""

import collections
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # read when triton is imported: a kernel that moves is the same kernel

import triton
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from triton.compiler.errors import CompilationError

from fastkv.kernels._launch import INTERPRET

from .engine import parser_of
from .variants import CHIPS, Chip, Variant, recorded

MAX_SPILL = 16  # bytes
LEAST_CODE = 64  # instructions; the shortest kernel has 120, one that was compiled to nothing had 16
TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
CHOSEN = ("num_warps", "num_stages", "maxnreg")  # launch options
WIDE = {"cuda": ("LDGSTS.E.BYPASS.128", "LDGSTS.E.128", "LDG.E.128"), "hip": ("load_dwordx4", "load_b128")}
NARROW = {"cuda": ("LDG.E.U16", "LDG.E.S16"), "hip": ("load_ushort", "load_u16", "load_short")}


def compile_variant(variant: Variant) -> triton.compiler.CompiledKernel:
    """The compiled kernel, with all stages on the way to it."""
    return triton.compile(variant.source, target=CHIPS[variant.chip].target, options=variant.options)


def digest(variant: Variant) -> str:
    """Twelve hexadecimal digits of what the compiler is given, its functions inlined; a tenth of the time of compiling
    it."""
    source, target = variant.source, CHIPS[variant.chip].target
    backend: Any = make_backend(target)
    options = backend.parse_options(variant.options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    code, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, code, modules, context)
    passes: dict[str, Any] = {}
    backend.add_stages(passes, options, source.language)
    module = passes["ttir"](module, {"target": target, **options.__dict__})
    chosen = {name: variant.options[name] for name in CHOSEN if variant.options.get(name) is not None}
    text = f"{target} {sorted(chosen.items())} {canonical(str(module))}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def canonical(text: str) -> str:
    """IR without places, with constants where they are used, and values numbered as they come: names are the source's,
    and constants stand in the order in which somebody asked for them."""
    text = re.sub(r" loc\(.*\)$|^#loc.*\n?", "", text, flags=re.M)
    constants = dict(re.findall(r"^ *(%[\w$.-]+) = arith\.constant (.*)$", text, re.M))
    text = re.sub(r"^ *%[\w$.-]+ = arith\.constant .*\n", "", text, flags=re.M)
    numbers: dict[str, str] = {}
    return re.sub(r"%[\w$.-]+", lambda m: constants.get(m[0]) or numbers.setdefault(m[0], f"%{len(numbers)}"), text)


def spilled_bytes(ptx: str, arch: int) -> int:
    """Spill bytes as `ptxas -v` reports them. Which of the two bundled ptxas knows the PTX depends on triton."""
    chip = re.search(r"\.target\s+(sm_\w+)", ptx)
    assert chip is not None
    names = ("ptxas", "ptxas-blackwell") if arch < 100 else ("ptxas-blackwell", "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        for name in names:
            command = [os.path.join(TOOLS, name), "-v", f"--gpu-name={chip[1]}", file.name, "-o", os.devnull]
            result = subprocess.run(command, capture_output=True, text=True)
            found = re.findall(r"(\d+) bytes spill (?:stores|loads)", result.stderr)
            if found:
                return max(map(int, found))
    raise RuntimeError(f"no bundled ptxas accepts this PTX: {result.stderr[-300:]}")


def dumped(cubin: bytes) -> str:
    """Resource usage and machine code, as cuobjdump prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [os.path.join(TOOLS, "cuobjdump"), "--dump-resource-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(names: list[str], prefixes: tuple[str, ...]) -> int:
    """How many instruction names contain one of the given pieces."""
    return sum(any(piece in name for piece in prefixes) for name in names)


TICKETS = {"cuda": r"\batom\.[\w.]*acq_rel[\w.]*", "hip": r"\bglobal_atomic_add\w*"}
STORES = {"cuda": r"\bst\.global", "hip": r"\b(?:global|buffer|flat)_store"}
WAITS = {  # what has to stand between the stores of all threads and the ticket of one; on AMD both in one basic block
    "cuda": r"\bbar\.sync",
    "hip": r"\bs_waitcnt[^\n]*vmcnt\(0\)(?:(?!\bs_cbranch|\n\.LBB)[\s\S])*?\bs_barrier",
}


def tickets(text: str, backend: str) -> tuple[int, int]:
    """How many tickets PTX or GCN takes, and before how many of them nothing waits for the stores of other threads."""
    found = [re.split(STORES[backend], before) for before in re.split(TICKETS[backend], text)[:-1]]
    return len(found), sum(len(parts) > 1 and not re.search(WAITS[backend], parts[-1]) for parts in found)


def bare_barriers(ttgir: str) -> int:
    """How many barriers that a kernel asks for stand right behind no wait for the stores of their threads, as
    `_barrier` has it for AMD. Those that the compiler adds for shared memory come later."""
    before = re.findall(r"^(.*)\n\s*(?:gpu|ttg)\.(?:local_)?barrier\b", ttgir, re.M)
    return sum("s_waitcnt vmcnt(0)" not in line for line in before)


def repeated(ttgir: str, least: int) -> int:
    """How many matrix products of at least so many columns several warps compute: all warps together have more rows or
    columns than the result."""
    layout = r"^(#\w+) = #ttg\.\w+<\{.*?warpsPerCTA = \[(\d+), (\d+)\].*?instrShape = \[(\d+), (\d+)"
    covered = {name: (int(a) * int(m), int(b) * int(n)) for name, a, b, m, n in re.findall(layout, ttgir, re.M)}
    results = re.findall(r"(?:tt\.dot|warp_group_dot) .*-> tensor<(\d+)x(\d+)x\w+, (#\w+)>", ttgir)
    wide = [(covered[name], int(m), int(n)) for m, n, name in results if int(n) >= least]
    return sum(rows > m or columns > n for (rows, columns), m, n in wide)


def faults(
    wide: bool, chip: Chip, spill: int, names: list[str], races: int | None, shared: int, repeats: int = 0,
    narrow: bool = False, bare: int = 0,
) -> list[str]:  # fmt: skip
    """What is beyond a limit, in words.

    Args: wide: whether 16-byte loads are expected; spill, shared: bytes; names: of all instructions; races: tickets
        that nothing orders, None if a ticket is missing; repeats: products that should not be; narrow: whether 2-byte
        loads are fine; bare: barriers past which stores may still be under way.
    """
    short = count(names, NARROW[chip.target.backend])
    limits = (
        (spill > MAX_SPILL, f"spills {spill} B"),
        (short > 0 and not narrow, f"{short} 2-byte loads"),
        (wide and not count(names, WIDE[chip.target.backend]), "no 16-byte loads"),
        (races is None, "no ticket"),
        (repeats > 0, f"{repeats} products computed by several warps"),
        (bool(races), "a ticket that does not wait for all stores"),
        (bare > 0, f"{bare} barriers that do not wait for stores"),
        (shared > chip.per_cta, f"shared memory above {chip.per_cta}"),
        (len(names) < LEAST_CODE, f"only {len(names)} instructions"),
    )
    return [text for bad, text in limits if bad]


def title(variant: Variant) -> str:
    return f"{variant.name:70s} {variant.chip:>6s}"


def check(variant: Variant) -> str:
    """Compile one variant. Returns: what its line says after the digest: "ok" at the end if it is within limits."""
    chip = CHIPS[variant.chip]
    backend, num_warps = chip.target.backend, variant.options["num_warps"]
    try:
        compiled = compile_variant(variant)
    except CompilationError as error:
        return f"FAIL: does not compile: {str(error).splitlines()[-1][:150]}"
    shared = compiled.metadata.shared
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        found = collections.Counter({k: int(v) for k, v in re.findall(r"\.(\w+_count):\s+(\d+)", text)})
        registers, spill = found["vgpr_count"], 4 * found["vgpr_spill_count"]
        names = re.findall(r"^\s+([a-z]\w+)", text, re.M)
        waves = min(512 // max(registers, 1), 8)
        ctas = min(waves * 4 // num_warps, chip.per_sm // max(shared, 1))
    else:
        text = compiled.asm["ptx"]
        machine = dumped(compiled.asm["cubin"])
        usage = {k: int(v) for k, v in re.findall(r"(REG|STACK):(\d+)", machine)}
        names = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", machine)
        registers = usage["REG"]
        spill = spilled_bytes(text, chip.target.arch) if usage["STACK"] else 0  # what is spilled lies on the stack
        per_cta = -(-registers // 8) * 8 * 32 * num_warps
        ctas = min(65536 // per_cta, chip.per_sm // (shared + 1024), 64 // num_warps)
    taken, races = tickets(text, backend)
    wide, narrow = count(names, WIDE[backend]), count(names, NARROW[backend])
    repeats = repeated(compiled.asm["ttgir"], variant.once) if variant.once else 0
    bare = bare_barriers(compiled.asm["ttgir"]) if backend == "hip" else 0
    numbers = None if variant.tickets and not taken else races, shared, repeats
    found_faults = faults(variant.wide, chip, spill, names, *numbers, variant.narrow, bare)
    return (
        f"regs {registers:3d}  spill {spill:4d}  shared {shared:6d}  "
        f"CTAs/SM {ctas:2d}  16-byte {wide:3d}  2-byte {narrow:2d}  code {len(names):5d}  "
        + ("FAIL: " + ", ".join(found_faults) if found_faults else "ok")
    )


class Table:
    """A file of lines, sorted, that is written as it grows.

    Attributes: lines: by title, a digest and what is said of it.  made: by digest, what is said of what was compiled
        and is within limits.
    """

    def __init__(self, path: Path) -> None:
        """Raises: SystemExit if the file was written with another triton."""
        self.path, self.first = path, f"triton {triton.__version__}"
        written = path.read_text().splitlines() if path.exists() else [self.first]
        if written[0] != self.first:
            raise SystemExit(f"{path} is of {written[0]}, not of {self.first}; name another file")
        cut = (re.fullmatch(r"(.*)  ir (\S+)  (.*)", line) for line in written[1:])
        self.lines = {found[1]: (found[2], found[3]) for found in cut if found}
        self.made = {of: said for of, said in self.lines.values() if said.endswith("  ok")}

    def add(self, variant: Variant, of: str, said: str) -> None:
        self.lines[title(variant)] = of, said
        self.made |= {of: said} if said.endswith("  ok") else {}
        self.write()

    def keep(self, found: Sequence[Variant]) -> None:
        """Drop the lines of variants that there are no longer, of the chips of those found."""
        titles = {title(variant) for variant in found}
        chips = {name.split()[-1] for name in titles}
        self.lines = {at: line for at, line in self.lines.items() if at in titles or at.split()[-1] not in chips}
        self.write()

    def write(self) -> None:
        lines = (f"{name}  ir {of}  {said}" for name, (of, said) in sorted(self.lines.items()))
        self.path.write_text("\n".join([self.first, *lines]) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: 1 if any variant is beyond a limit, else 0."""
    parser = parser_of("perf.aot", __doc__)
    chips = {"default": "90", "choices": [*CHIPS, "all"]}
    parser.add_argument("--arch", **chips, help="compute capability or AMD chip (default 90)")
    parser.add_argument("--match", nargs="+", default=[""], help="only variants whose kernel or name has one of these")
    parser.add_argument("--sample", action="store_true", help="only one variant of every kernel function")
    parser.add_argument("--table", type=Path, help="file of lines: compile only what has changed, write it anew")
    options = parser.parse_args(arguments)
    if INTERPRET:
        raise SystemExit("unset TRITON_INTERPRET: ahead-of-time compilation needs the compiler, not the interpreter")
    print("triton", triton.__version__)
    table = Table(options.table) if options.table else None
    found = [variant for chip in (CHIPS if options.arch == "all" else [options.arch]) for variant in recorded(chip)]
    chosen = [one for one in found if any(part in f"{one.of} {one.name}" for part in options.match)]
    if options.sample:  # the first of each kernel function, of each chip
        chosen = list({(one.chip, one.kernel): one for one in reversed(chosen)}.values())[::-1]
    lines, compiled = [], 0
    for variant in chosen:
        of = digest(variant) if table else "-" * 12
        known = table.made.get(of) if table else None
        lines.append(known or check(variant))
        if table:
            table.add(variant, of, lines[-1])
        if known is None:
            compiled += 1
            print(f"{title(variant)}  ir {of}  {lines[-1]}", flush=True)
    if table:
        table.keep(found)
    fine = sum(line.endswith("  ok") for line in lines)
    print(f"{fine} within limits, {len(lines) - fine} not, {compiled} compiled")
    return 0 if lines and fine == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
