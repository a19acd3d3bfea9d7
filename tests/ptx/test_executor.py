"""The executor itself, on PTX written by hand: what instructions compute, and what is reported."""

import math
import struct

import numpy as np
import pytest
import torch

from .launch import execute
from .memory import Fault
from .parse import PTXError, only_stored, parse
from .program import Executable

PARAMETERS = 4


def kernel(body, threads=32):
    """An entry `_test_kernel` with registers enough, whose parameters are in %rd1 to %rd4."""
    params = ", ".join(f".param .u64 .ptr .global .align 1 _test_kernel_param_{i}" for i in range(PARAMETERS))
    loads = "\n".join(f"ld.param.b64 %rd{i + 1}, [_test_kernel_param_{i}];" for i in range(PARAMETERS))
    return f""".version 8.7
.target sm_80
.visible .entry _test_kernel({params})
.reqntid {threads}
{{
.reg .pred %p<9>;
.reg .b16 %rs<20>;
.reg .b32 %r<40>;
.reg .b64 %rd<30>;
{loads}
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mul.wide.u32 %rd9, %r1, 4;
add.s64 %rd10, %rd1, %rd9;
{body}
}}
"""


def run(body, *tensors, grid=1, threads=32, shared=0, order=0, unwritten=None):
    """Launch it with these tensors."""
    arguments = {f"_test_kernel_param_{i}": 0 for i in range(PARAMETERS)}
    arguments |= {f"_test_kernel_param_{i}": tensor for i, tensor in enumerate(tensors)}
    named = {f"tensor{i}_ptr": tensor for i, tensor in enumerate(tensors)}
    with np.errstate(all="ignore"):
        execute(Executable(parse(kernel(body, threads))), (grid, 1, 1), arguments, named, shared, order, unwritten)


def fault(kind, match, body, *tensors, **how):
    """It is reported, with kernel, program and line."""
    with pytest.raises(Fault, match=match) as found:
        run(body, *tensors, **how)
    assert found.value.kind == kind and "_test_kernel" in str(found.value) and "of the PTX" in str(found.value)
    return found.value


def bits(value, kind):
    """The bits of a number as that type, in 64 of a register."""
    formats = {"f16": "<e", "f32": "<f", "f64": "<d"}
    if kind in formats:
        return int.from_bytes(struct.pack(formats[kind], value), "little")
    if kind == "bf16":
        return bits(value, "f32") >> 16
    return int(value) & ((1 << int(kind[1:])) - 1)


def computed(opcode, kinds, to, *values):
    """What an instruction makes of these numbers, as bits."""
    names = {16: "rs", 32: "r", 64: "rd", 8: "rs"}
    width = {kind: int("".join(c for c in kind if c.isdigit()) if kind != "bf16" else 16) for kind in {*kinds, to}}
    lines, sources = [], []
    for number, (kind, value) in enumerate(zip(kinds, values), 11):
        register, size = f"%{names[width[kind]]}{number}", max(width[kind], 16)
        lines.append(f"mov.b{size} {register}, {bits(value, kind)};")
        sources.append(register)
    target, size = f"%{names[width[to]]}10", max(width[to], 16)
    lines.append(f"{opcode} {', '.join([target.replace('rd10', 'rd20'), *sources])};")
    target = target.replace("rd10", "rd20")
    lines.append(f"st.global.b{size} [%rd1], {target};\nret;")
    out = torch.zeros(1, dtype=torch.int64)
    run("\n".join(lines), out)
    return out.item() & ((1 << size) - 1)


COMPUTED = [
    ("add.s32", "s32 s32", "s32", (2**31 - 1, 1), -(2**31)),
    ("mul.wide.s32", "s32 s32", "s64", (-70000, 70000), -70000 * 70000),
    ("mul.wide.u32", "u32 u32", "u64", (2**32 - 1, 4), 4 * (2**32 - 1)),
    ("mul.hi.s32", "s32 s32", "s32", (-(2**31), 3), -2),
    ("mad.wide.u32", "u32 u32 u64", "u64", (2**31, 4, 2**40), 2**33 + 2**40),
    ("min.f32", "f32 f32", "f32", (math.nan, 5.0), 5.0),
    ("fma.rn.f32", "f32 f32 f32", "f32", (1 + 2**-12, 1 + 2**-12, -1.0), 2**-11 + 2**-24),
    ("ex2.approx.ftz.f32", "f32", "f32", (-3.0,), 0.125),
    ("lop3.b32", "u32 u32 u32 u32", "u32", (12, 10, 65, 0xEA), 73),
    ("lop3.b32", "u32 u32 u32 u32", "u32", (2**31, 5, 2**31 + 1, 0x96), 4),
    ("fma.rn.bf16x2", "u32 u32 u32", "u32", (0x43054300, 0x3B803B80, 0xBF80BF00), 0xBEF60000),
    ("fma.rn.f16x2", "u32 u32 u32", "u32", (0x3C006480, 0x1C001C00, 0x3C00C480), 0x3C040000),
    ("shl.b32", "u32 u32", "u32", (3, 33), 0),
    ("shr.s32", "s32 u32", "s32", (-8, 40), -1),
    ("bfe.u32", "u32 u32 u32", "u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.s32", "s32 u32 u32", "s32", (0x80, 7, 1), -1),
    ("prmt.b32", "u32 u32 u32", "u32", (0x44332211, 0x88776655, 0x7540), 0x88665511 - 0),
    ("prmt.b32", "u32 u32 u32", "u32", (0x000000F0, 0, 0x8888), 0xFFFFFFFF),
    ("cvt.rn.bf16.f32", "f32", "bf16", (1 + 2**-8,), 1.0),
    ("cvt.rn.bf16.f32", "f32", "bf16", (1 + 3 * 2**-8,), 1 + 2**-6),
    ("cvt.rn.f16.f32", "f32", "f16", (1e6,), math.inf),
    ("cvt.rn.bf16x2.f32", "f32 f32", "u32", (1.0, -2.0), 0x3F80C000),
    ("cvt.rzi.s32.f32", "f32", "s32", (-2.9,), -2),
    ("cvt.rzi.s32.f32", "f32", "s32", (1e20,), 2**31 - 1),
    ("cvt.rzi.s32.f32", "f32", "s32", (math.nan,), 0),
    ("cvt.rn.f32.s64", "s64", "f32", (2**24 + 1,), 2.0**24),
    ("cvt.s8.s32", "s32", "s16", (0x180,), -128),
]


@pytest.mark.parametrize("opcode, kinds, to, values, expected", COMPUTED)
def test_computes(opcode, kinds, to, values, expected):
    assert computed(opcode, kinds.split(), to, *values) == bits(expected, to)


def test_what_is_not_known_is_refused_in_one_sentence():
    for body, match in {
        "tanh.approx.f32 %r3, %r1;": "not executed here.*tanh",
        "bar.sync 1;": "only barrier 0",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r1;": "not executed here",
        "mov.u32 %r3, %clock;": "%clock is not known",
        "mov.u32 %r3, %r99;": "not understood",
        ".local .b8 x[4];": "not understood",
    }.items():
        with pytest.raises(PTXError, match=match):
            run(body + "\nret;", torch.zeros(1))
    with pytest.raises(PTXError, match="one entry"):
        parse(".version 8.7")


STORE = "st.global.b32 [%rd10 + {}], %r1;\nret;"


def test_accesses_outside_of_tensors():
    whole = torch.zeros(40, dtype=torch.int32)
    run(STORE.format(0), whole[:32])
    assert whole.tolist() == [*range(32), *[0] * 8]
    beyond = r"outside of every tensor, next to tensor0_ptr \+ 128 bytes"
    assert fault("bounds", beyond, STORE.format(4), whole[:32]).thread == 31
    assert fault("bounds", "outside", STORE.format(-4), whole[:32]).thread == 0
    far = STORE.format(4 * (whole[:32].numel() + 1000))
    fault("bounds", "outside", far, whole[:32], torch.zeros(1 << 20))  # which may lie behind
    rows = torch.zeros(4, 16, dtype=torch.int32)[:, :8]  # between its rows is memory of others
    assert fault("bounds", "outside", STORE.format(0), rows).thread == 8


def test_misaligned_accesses():
    numbers = torch.zeros(64, dtype=torch.int32)
    assert fault("alignment", "no multiple of 8", "st.global.b64 [%rd10], %rd1;\nret;", numbers).thread == 1
    fault("alignment", "shared memory", "st.shared.b32 [%r1], %r1;\nret;", shared=64)


def test_reads_of_what_nobody_wrote():
    out, source = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    known = np.ones(128, bool)
    known[20:24] = False
    read = "add.s64 %rd11, %rd2, %rd9;\nld.global.b32 %r3, [%rd11];\nst.global.b32 [%rd10], %r3;\nret;"
    found = fault("uninitialised", r"tensor1_ptr \+ 20 bytes", read, out, source, unwritten={source.data_ptr(): known})
    assert found.thread == 5
    shared = "shl.b32 %r3, %r1, 2;\n{} st.shared.b32 [%r3], %r1;\nld.shared.b32 %r4, [%r3];\nret;"
    run("setp.ne.b32 %p1, %r1, 7;\n" + shared.format(""), shared=128)
    some = "setp.ne.b32 %p1, %r1, 7;\n" + shared.format("@%p1")
    assert fault("uninitialised", "shared", some, shared=128).thread == 7
    fault("bounds", "beyond its 128 bytes", shared.format("").replace("[%r3]", "[%r3+4]"), shared=128)


EXCHANGE = """
    shl.b32 %r3, %r1, 2;
    xor.b32 %r4, %r3, {other};
    st.shared.b32 [%r3], %r1;
    {barrier}
    ld.shared.b32 %r5, [%r4];
    {after}
    st.shared.b32 [%r3], %r5;
    ret;
"""


@pytest.mark.parametrize(
    "other, barrier, after, wrong",
    [
        (128, "bar.sync 0;", "bar.sync 0;", None), (128, "", "bar.sync 0;", "thread 32 wrote"),
        (128, "bar.sync 0;", "", "thread 32 read"), (128, "bar.warp.sync -1;", "bar.sync 0;", "warp 1 wrote"),
        (4, "bar.warp.sync -1;", "bar.warp.sync -1;", None), (4, "", "bar.warp.sync -1;", "thread 1 wrote"),
        (4, "bar.warp.sync -1;", "", "thread 1 read"), (0, "", "", None),
    ],
)  # fmt: skip
def test_threads_of_a_program_without_a_barrier_in_between(other, barrier, after, wrong):
    body = EXCHANGE.format(other=other, barrier=barrier, after=after)
    if wrong is None:
        run(body, threads=64, shared=256)
    else:
        fault("race", wrong, body, threads=64, shared=256)


def test_threads_that_write_the_same_place_at_once():
    run("mov.b32 %r9, 0;\nmov.b32 %r3, 5;\nst.shared.b32 [%r9], %r3;\nret;", shared=4)
    fault("race", "different bytes", "mov.b32 %r9, 0;\nst.shared.b32 [%r9], %r1;\nret;", shared=4)
    fault("race", "different numbers", "st.global.b32 [%rd1], %r1;\nret;", torch.zeros(1, dtype=torch.int32))


def test_barriers_that_not_all_reach():
    body = "setp.{} %p1, %r1, 40;\n@%p1 bra $end;\n{};\n$end:\nret;"
    found = fault("barrier", "does not reach a barrier", body.format("lt.u32", "bar.sync 0"), threads=64)
    assert found.thread == 0
    found = fault(
        "divergence", "others of its warp", body.format("lt.u32", "shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1"), threads=64
    )
    assert found.thread == 32
    run(body.format("ge.u32", "add.s32 %r3, %r1, 1"), threads=64)


COPY = """
    shl.b32 %r3, %r1, 2;
    add.s64 %rd11, %rd2, %rd9;
    cp.async.ca.shared.global [ %r3 + 0 ], [ %rd11 + 0 ], 0x4, {given};
    cp.async.commit_group;
    cp.async.ca.shared.global [ %r3 + 128 ], [ %rd11 + 128 ], 0x4, {given};
    cp.async.commit_group;
    cp.async.wait_group {left};
    ld.shared.b32 %r4, [%r3+128];
    st.global.b32 [%rd10], %r4;
    ret;
"""


def test_copies_are_awaited():
    out, source = torch.zeros(32, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
    run(COPY.format(given=4, left=0), out, source, shared=256)
    assert torch.equal(out, source[32:])
    run(COPY.format(given=0, left=0), out, source, shared=256)
    assert not out.any()
    fault("pending", "before its wait", COPY.format(given=4, left=1), out, source, shared=256)
    early = COPY.format(given=4, left=0).replace(
        "cp.async.wait_group", "st.shared.b32 [%r3], %r1;\ncp.async.wait_group"
    )
    fault("pending", "writes what", early, out, source, shared=256)


def test_programs_that_touch_the_same_place():
    parts = torch.zeros(64, dtype=torch.int32)
    mine = "mul.wide.u32 %rd11, %r2, {};\nadd.s64 %rd12, %rd10, %rd11;\nst.global.b32 [%rd12], %r1;\nret;"
    run(mine.format(128), parts, grid=2)
    found = fault("race", r"tensor0_ptr \+ 64 bytes is touched in no order", mine.format(64), parts, grid=2)
    assert "program (0, 0, 0)" in str(found) and "program (1, 0, 0)" in str(found)


COUNT = """
    ld.global.b32 %r3, [%rd1];
    add.s32 %r4, %r3, 1;
    setp.eq.b32 %p1, %r1, 0;
    @%p1 st.global.b32 [%rd1], %r4;
    {}
    ret;
"""


def test_what_is_loaded_only_to_be_stored_counts_for_who_stores_it():
    """All threads load a number and one stores the next: a race only if others use what they have loaded."""
    count = torch.tensor([5, *[0] * 100], dtype=torch.int32)
    assert only_stored(parse(kernel(COUNT.format(""))))
    run(COUNT.format(""), count, threads=64)
    assert count[0] == 6
    used = "setp.eq.b32 %p2, %r3, 6;\n@%p2 st.global.b32 [%rd10+64], %r1;"
    assert not only_stored(parse(kernel(COUNT.format(used))))
    fault("race", "in no order", COUNT.format(used), count, threads=64)
    fault("race", "in no order", COUNT.format("st.global.b32 [%rd10+32], %r4;"), count, threads=32)
