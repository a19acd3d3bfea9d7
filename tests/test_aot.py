"""Every kernel compiles ahead of time for sm_90 within its limits of registers, spills, loads and shared memory."""

import importlib
import inspect
import pkgutil
import re

import pytest

import fastkv.kernels
from perf import aot
from perf.aot import CHIPS, bare_barriers, faults, repeated, tickets, variants
from perf.variants import AOT

from .processes import begin, of_module


@pytest.fixture
def compiled(tmp_path):
    """Compiles what the arguments of perf.aot name, where Triton's interpreter is off. Returns: lines that say ok."""

    def run(*arguments):
        code, said, errors = begin(of_module("perf.aot"), tmp_path, *arguments).ended(timeout=900)
        assert code == 0, said + errors
        return [line for line in said.splitlines() if line.endswith(" ok")]

    return run


def test_one_variant_of_every_kernel_function_on_sm_90(compiled):
    wanted = {v.kernel for v in variants(None) if not v.arches or "90" in v.arches}
    assert len(compiled("--arch", "90", "--sample")) == len(wanted)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kernel", AOT)
def test_all_variants_on_sm_90(kernel, compiled):
    lines = compiled("--arch", "90", "--kernel", kernel)
    wanted = [v for v in variants(kernel) if not v.arches or "90" in v.arches]
    assert wanted and len(lines) == len(wanted)


def test_every_kernel_has_variants():
    wanted = {}
    for module in pkgutil.iter_modules(fastkv.kernels.__path__):
        source = inspect.getsource(importlib.import_module(f"fastkv.kernels.{module.name}"))
        kernels = set(re.findall(r"^def (_\w+_kernel)\(", source, re.M))
        wanted |= {module.name: kernels} if kernels else {}
    assert wanted == {name: {one.kernel.__name__ for one in some} for name, some in AOT.items()}


@pytest.mark.parametrize(
    "what,given",
    {
        None: {},
        "spills 24 B": {"spill": 24},
        "2 2-byte loads": {"more": ["LDG.E.U16"] * 2},
        "no 16-byte loads": {"loads": "LDG.E.64"},
        "a ticket that does not wait for all stores": {"races": 1},
        "2 barriers that do not wait for stores": {"bare": 2},
        "no ticket": {"races": None},
        "2 products computed by several warps": {"repeats": 2},
        "shared memory above 232448": {"shared": 1 << 20},
        "only 10 instructions": {"size": 10},
    }.items(),
)
def test_limits(what, given):
    names = [given.get("loads", "LDG.E.128")] * given.get("size", 100) + given.get("more", [])
    numbers = given.get("races", 0), given.get("shared", 0), given.get("repeats", 0)
    found = faults(True, CHIPS["90"], given.get("spill", 16), names, *numbers, bare=given.get("bare", 0))
    assert found == ([] if what is None else [what])


@pytest.mark.parametrize("arch", [pytest.param("90", marks=pytest.mark.slow), "gfx942"])
def test_all_stores_are_done_before_a_ticket_is_taken(arch, compiled):
    taking = ["decode bf16 D64 G4 splits 16 order 1 append", "vector bf16 D64 G4 splits 8 order 1 append"]
    lines = compiled("--arch", arch, "--sample", "--match", *taking, "evict bf16 D64 slots 1040 drop 16 order 1 slope")
    assert len(lines) == 3


def test_keys_of_long_heads_are_written_before_other_threads_count_them(compiled):
    assert len(compiled("--arch", "gfx942", "--kernel", "select", "--match", "looped")) == 1


@pytest.mark.parametrize("name", ["gpu.barrier", "ttg.barrier all", "ttg.local_barrier"])
def test_a_barrier_that_waits_for_no_stores_is_found(name):
    store, barrier = "tt.store %93, %92 : tensor<64x!tt.ptr<i32>>\n", f"    {name} loc(#loc)\n"
    wait = '%1 = tt.elementwise_inline_asm "s_waitcnt vmcnt(0)\\0Av_mov_b32 $0, $1" {pure = false} %0 : i32 -> i32\n'
    assert bare_barriers(store + barrier + store + wait + barrier) == 1
    assert bare_barriers(wait + barrier) == 0 and bare_barriers(store + wait + store + barrier) == 1


STORE, TICKET = (
    {"hip": "\tglobal_store_dword v1, v2, s[4:5]\n", "cuda": "\tst.global.b32 [%rd1], %r1;\n"},
    {
        "hip": "\tglobal_atomic_add v1, v2, v1, s[4:5] sc0\n",
        "cuda": "\tatom.global.gpu.acq_rel.add.u32 %r1, [%rd1], %r2;\n",
    },
)


@pytest.mark.parametrize(
    "backend,between,races",
    [
        ("cuda", "", 1),
        ("cuda", "\tbar.sync 0;\n", 0),
        ("hip", "\ts_barrier\n", 1),
        ("hip", "\ts_waitcnt vmcnt(0)\n", 1),
        ("hip", "\ts_waitcnt vmcnt(1) lgkmcnt(0)\n\ts_barrier\n", 1),
        ("hip", "\ts_barrier\n\ts_waitcnt vmcnt(0)\n", 1),
        ("hip", "\ts_waitcnt vmcnt(0)\n\ts_cbranch_execz .LBB0_1\n\ts_barrier\n", 1),
        ("hip", "\ts_waitcnt vmcnt(0)\n.LBB0_1:\n\ts_barrier\n", 1),
        ("hip", "\ts_waitcnt vmcnt(0)\n\tv_mov_b32 v1, v2\n\ts_barrier\n", 0),
        ("hip", "\ts_waitcnt lgkmcnt(0) vmcnt(0)\n\ts_barrier\n\ts_cbranch_execz .LBB0_1\n", 0),
    ],
)
def test_tickets_wait_for_the_stores_of_all_threads(backend, between, races):
    assert tickets(STORE[backend] + between + TICKET[backend], backend) == (1, races)
    assert tickets(between + TICKET[backend], backend) == (1, 0)


MMA = "#mma = #ttg.nvidia_mma<{versionMajor = 3, warpsPerCTA = [8, 1], instrShape = [16, 64, 16]}>\n"


@pytest.mark.parametrize("result,repeats", [("128x64", 0), ("64x64", 1), ("256x128", 0), ("128x32", 1), ("64x16", 0)])
def test_products_of_several_warps_are_found(result, repeats):
    dot = (
        f"%a = ttng.warp_group_dot %q, %k : tensor<{result}xbf16, #s> * tensor<16xf32> -> tensor<{result}xf32, #mma>\n"
    )
    assert repeated(MMA + dot, 32) == repeats


@pytest.mark.parametrize("chip", CHIPS)
def test_every_head_size_of_a_prompt_block_is_checked_for_repeated_products(chip):
    sizes = [v for v in variants("prefill_attention") if v.arches == (chip,)]
    widths = {
        kind: {one.constants["TILE"].BD for one in sizes if kind in one.name} for kind in ("bf16", "fp32", "centroids")
    }
    assert widths["bf16"] >= {64, 128, 256} and widths["fp32"] == {64, 128, 256}
    assert (512 in widths["bf16"]) == (512 in widths["centroids"]) == (chip != "gfx942")
    # Tiles of no more keys than centroids at a time: products with those are checked as well.
    assert all(one.once == one.constants["TILE"].BLOCK_N >= one.constants["TILE"].BLOCK_C for one in sizes)


@pytest.mark.slow
def test_no_product_of_a_prompt_block_is_computed_twice(compiled):
    assert len(compiled("--kernel", "prefill_attention", "--match", "bf16 G4 order1")) >= 6


def test_an_unknown_kernel_is_an_error(monkeypatch):
    monkeypatch.setattr(aot, "INTERPRET", False)
    with pytest.raises(SystemExit, match="no kernel module named 'nothing'"):
        aot.main(["--kernel", "nothing"])


def test_a_table_compiles_only_what_has_changed(monkeypatch, tmp_path, capsys):
    few, file = variants("slot_signals")[:2], tmp_path / "table.txt"
    monkeypatch.setattr(aot, "INTERPRET", False)
    monkeypatch.setattr(aot, "AOT", {"slot_signals": few})
    monkeypatch.setattr(aot, "digest", lambda variant, chip: f"{len(variant.name):012x}")
    monkeypatch.setattr(aot, "check", lambda variant, arch, of: f"{aot.title(variant, arch)}  ir {of}  regs 1  ok")
    first = f"triton {aot.triton.__version__}"
    gone = f"{'no kernel of now':58s} {'90':>6s}  ir {0:012x}  regs 1  ok"
    file.write_text("\n".join([first, gone, aot.check(few[0], "90", f"{0:012x}")]) + "\n")
    for compiled in (2, 0):  # one line is of another digest, one is missing
        assert aot.main(["--table", str(file)]) == 0
        assert capsys.readouterr().out.endswith(f"2 within limits, 0 not, {compiled} compiled\n")
        lines = file.read_text().splitlines()
        assert lines[0] == first and sorted(lines[1:]) == lines[1:] and len(lines) == 3
        assert all(any(line.startswith(aot.title(v, "90")) for line in lines) for v in few)
    file.write_text("triton 0.0\n")
    with pytest.raises(SystemExit, match=r"is of triton 0\.0"):
        aot.main(["--table", str(file)])


def test_names_places_and_the_order_of_constants_do_not_change_a_digest():
    lines = ["%a = arith.constant 1 : i32 loc(#loc1)", "%b = arith.constant 2 : i32", "%x = arith.subi %a, %b : i32"]
    text = "\n".join(lines)
    same = "\n".join([lines[1], lines[0], lines[2], "#loc1 = loc(unknown)"]).replace("%x", "%other")
    assert aot.canonical(text) == aot.canonical(same).rstrip("\n")
    assert aot.canonical(text) != aot.canonical(text.replace("%a, %b", "%b, %a"))
