"""Every kernel compiles ahead of time for sm_90 within its limits of registers, spills, loads and shared memory."""

import importlib
import inspect
import re

import pytest

from perf import aot
from perf.aot import CHIPS, bare_barriers, faults, repeated, tickets

from .launches import kernel_modules
from .processes import begin, of_module, run


@pytest.fixture
def compiled(tmp_path):
    """Compiles what the arguments of perf.aot name, where Triton's interpreter is off. Returns: lines that say ok."""

    def run(*arguments):
        code, said, errors = begin(of_module("perf.aot"), tmp_path, *arguments).ended(timeout=900)
        assert code == 0, said + errors
        return [line for line in said.splitlines() if line.endswith(" ok")]

    return run


def kernels():
    """Kernel functions by module."""
    found = {}
    for module in kernel_modules():
        names = re.findall(r"^def _(\w+)_kernel\(", inspect.getsource(module), re.M)
        found |= {module.__name__.rpartition(".")[2]: names} if names else {}
    return found


@pytest.mark.parametrize("module", kernels())
def test_what_belongs_together_is_one_argument(module):
    for name in kernels()[module]:
        kernel = getattr(importlib.import_module(f"fastkv.kernels.{module}"), f"_{name}_kernel")
        assert len(kernel.arg_names) <= 15, f"{name}: make tuples of them, see fastkv/kernels/_arguments.py"


def test_one_variant_of_every_kernel_function_on_sm_90(compiled):
    lines = compiled("--arch", "90", "--sample")
    wanted = [f"{module}.{name}" for module, names in kernels().items() for name in names]
    assert sorted(line.split()[0] for line in lines) == sorted(wanted)


@pytest.mark.parametrize(
    "what,given",
    {
        None: {}, "spills 24 B": {"spill": 24}, "2 2-byte loads": {"more": ["LDG.E.U16"] * 2},
        "no 16-byte loads": {"loads": "LDG.E.64"}, "a ticket that does not wait for all stores": {"races": 1},
        "2 barriers that do not wait for stores": {"bare": 2}, "no ticket": {"races": None},
        "2 products computed by several warps": {"repeats": 2}, "shared memory above 232448": {"shared": 1 << 20},
        "only 10 instructions": {"size": 10},
    }.items(),
)  # fmt: skip
def test_limits(what, given):
    names = [given.get("loads", "LDG.E.128")] * given.get("size", 100) + given.get("more", [])
    numbers = given.get("races", 0), given.get("shared", 0), given.get("repeats", 0)
    found = faults(True, CHIPS["90"], given.get("spill", 16), names, *numbers, bare=given.get("bare", 0))
    assert found == ([] if what is None else [what])


@pytest.mark.parametrize("arch", [pytest.param("90", marks=pytest.mark.slow), "gfx942"])
def test_all_stores_are_done_before_others_read_them(arch, compiled):
    """Before a ticket is taken, and before other threads count the keys of long heads."""
    taking = ["decode_attention.decode_attention dim=64 splits=16", "vector_decode.vector_decode dim=64"]
    taking += ["select.select length=20000"]
    assert len(compiled("--arch", arch, "--sample", "--match", *taking)) == 3


@pytest.mark.parametrize("name", ["gpu.barrier", "ttg.barrier all", "ttg.local_barrier"])
def test_a_barrier_that_waits_for_no_stores_is_found(name):
    store, barrier = "tt.store %93, %92 : tensor<64x!tt.ptr<i32>>\n", f"    {name} loc(#loc)\n"
    wait = '%1 = tt.elementwise_inline_asm "s_waitcnt vmcnt(0)\\0Av_mov_b32 $0, $1" {pure = false} %0 : i32 -> i32\n'
    assert bare_barriers(store + barrier + store + wait + barrier) == 1
    assert bare_barriers(wait + barrier) == 0 and bare_barriers(store + wait + store + barrier) == 1


STORE = {"hip": "\tglobal_store_dword v1, v2, s[4:5]\n", "cuda": "\tst.global.b32 [%rd1], %r1;\n"}
TICKET = {"hip": "\tglobal_atomic_add v1, v2, v1, s[4:5] sc0\n"}
TICKET["cuda"] = "\tatom.global.gpu.acq_rel.add.u32 %r1, [%rd1], %r2;\n"


@pytest.mark.parametrize(
    "backend,between,races",
    [
        ("cuda", "", 1), ("cuda", "\tbar.sync 0;\n", 0), ("hip", "\ts_barrier\n", 1),
        ("hip", "\ts_waitcnt vmcnt(0)\n", 1), ("hip", "\ts_waitcnt vmcnt(1) lgkmcnt(0)\n\ts_barrier\n", 1),
        ("hip", "\ts_barrier\n\ts_waitcnt vmcnt(0)\n", 1), ("hip", "\ts_waitcnt vmcnt(0)\n.LBB0_1:\n\ts_barrier\n", 1),
        ("hip", "\ts_waitcnt vmcnt(0)\n\ts_cbranch_execz .LBB0_1\n\ts_barrier\n", 1),
        ("hip", "\ts_waitcnt vmcnt(0)\n\tv_mov_b32 v1, v2\n\ts_barrier\n", 0),
        ("hip", "\ts_waitcnt lgkmcnt(0) vmcnt(0)\n\ts_barrier\n\ts_cbranch_execz .LBB0_1\n", 0),
    ],
)  # fmt: skip
def test_tickets_wait_for_the_stores_of_all_threads(backend, between, races):
    assert tickets(STORE[backend] + between + TICKET[backend], backend) == (1, races)
    assert tickets(between + TICKET[backend], backend) == (1, 0)


MMA = "#mma = #ttg.nvidia_mma<{versionMajor = 3, warpsPerCTA = [8, 1], instrShape = [16, 64, 16]}>\n"


@pytest.mark.parametrize("result,repeats", [("128x64", 0), ("64x64", 1), ("256x128", 0), ("128x32", 1), ("64x16", 0)])
def test_products_of_several_warps_are_found(result, repeats):
    dot = f"%a = ttng.warp_group_dot %q, %k : tensor<{result}xbf16, #s> * tensor<16xf32> -> tensor<{result}xf32, #mma>"
    assert repeated(f"{MMA}{dot}\n", 32) == repeats


RECORDED = """
import os

os.environ["TRITON_INTERPRET"] = "0"
from perf.variants import CHIPS, recorded

for chip in CHIPS:
    for one in recorded(chip):
        if one.of == "prefill_attention.prefill":
            tile = one.constant("TILE")
            # Tiles of no more keys than centroids at a time: products with those are checked as well.
            assert one.once == tile.BLOCK_N >= tile.BLOCK_C, one.name
            print(chip, tile.BD, one.given.get("dtype", "bf16"), one.given.get("correction", "moments"))
"""


def test_every_head_size_of_a_prompt_block_is_checked_for_repeated_products(tmp_path):
    code, said, errors = run(RECORDED, tmp_path)
    assert code == 0, errors
    found = {tuple(line.split()) for line in said.splitlines()}
    for chip in CHIPS:
        common, wide = {"64", "128", "256"}, {"512"} if chip != "gfx942" else set()
        for kind in (("bf16", "moments"), ("bf16", "centroids"), ("fp32", "moments"), ("fp32", "centroids")):
            widths = {width for one, width, *rest in found if one == chip and tuple(rest) == kind}
            assert widths - {"16", "32"} == common | (wide if "bf16" in kind else set()), (chip, kind)


def test_names_places_and_the_order_of_constants_do_not_change_a_digest():
    lines = ["%a = arith.constant 1 : i32 loc(#loc1)", "%b = arith.constant 2 : i32", "%x = arith.subi %a, %b : i32"]
    text = "\n".join(lines)
    same = "\n".join([lines[1], lines[0], lines[2], "#loc1 = loc(unknown)"]).replace("%x", "%other")
    assert aot.canonical(text) == aot.canonical(same).rstrip("\n")
    assert aot.canonical(text) != aot.canonical(text.replace("%a, %b", "%b, %a"))
