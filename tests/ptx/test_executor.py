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
    ("add.s32", "s32 s32", "s32", (2**31 - 1, 1), -(2**31)), ("sub.s64", "s64 s64", "s64", (3, 5), -2),
    ("mul.lo.s32", "s32 s32", "s32", (70000, 70000), 70000 * 70000 - 2**32),
    ("mul.wide.s32", "s32 s32", "s64", (-70000, 70000), -70000 * 70000),
    ("mul.wide.u32", "u32 u32", "u64", (2**32 - 1, 4), 4 * (2**32 - 1)),
    ("mul.hi.s32", "s32 s32", "s32", (-(2**31), 3), -2), ("mul.hi.u32", "u32 u32", "u32", (2**31, 3), 1),
    ("mul.hi.u64", "u64 u64", "u64", (2**63, 2**63), 2**62), ("mul.hi.u16", "u16 u16", "u16", (2**15, 3), 1),
    ("mad.lo.s32", "s32 s32 s32", "s32", (3, -4, 5), -7),
    ("mad.wide.u32", "u32 u32 u64", "u64", (2**31, 4, 2**40), 2**33 + 2**40),
    ("div.s32", "s32 s32", "s32", (-7, 2), -3), ("min.u32", "u32 u32", "u32", (2**32 - 1, 5), 5),
    ("max.s32", "s32 s32", "s32", (-1, 5), 5), ("min.f32", "f32 f32", "f32", (math.nan, 5.0), 5.0),
    ("max.bf16", "bf16 bf16", "bf16", (-1.5, 0.5), 0.5),
    ("fma.rn.f32", "f32 f32 f32", "f32", (1 + 2**-12, 1 + 2**-12, -1.0), 2**-11 + 2**-24),
    ("div.full.f32", "f32 f32", "f32", (1.0, 4.0), 0.25), ("ex2.approx.ftz.f32", "f32", "f32", (-3.0,), 0.125),
    ("sqrt.approx.ftz.f32", "f32", "f32", (9.0,), 3.0), ("neg.s32", "s32", "s32", (7,), -7),
    ("abs.f32", "f32", "f32", (-7.0,), 7.0), ("not.b32", "u32", "u32", (1,), 2**32 - 2),
    ("lop3.b32", "u32 u32 u32 u32", "u32", (12, 10, 65, 0xEA), 73),
    ("lop3.b32", "u32 u32 u32 u32", "u32", (2**31, 5, 2**31 + 1, 0x96), 4),
    ("fma.rn.bf16x2", "u32 u32 u32", "u32", (0x43054300, 0x3B803B80, 0xBF80BF00), 0xBEF60000),
    ("fma.rn.f16x2", "u32 u32 u32", "u32", (0x3C006480, 0x1C001C00, 0x3C00C480), 0x3C040000),
    ("xor.b32", "u32 u32", "u32", (12, 10), 6), ("shl.b32", "u32 u32", "u32", (3, 33), 0),
    ("shl.b32", "u32 u32", "u32", (3, 31), 2**31), ("shr.s32", "s32 u32", "s32", (-8, 40), -1),
    ("shr.u64", "u64 u32", "u64", (2**40, 38), 4), ("bfe.u32", "u32 u32 u32", "u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.u64", "u64 u32 u32", "u64", (0xABCD << 32, 36, 8), 0xBC),
    ("bfe.s32", "s32 u32 u32", "s32", (0x80, 7, 1), -1),
    ("bfi.b32", "u32 u32 u32 u32", "u32", (0xABCDEF, 0x11223344, 16, 8), 0x11EF3344),
    ("prmt.b32", "u32 u32 u32", "u32", (0x44332211, 0x88776655, 0x7540), 0x88665511 - 0),
    ("prmt.b32", "u32 u32 u32", "u32", (0x000000F0, 0, 0x8888), 0xFFFFFFFF), ("popc.b32", "u32", "u32", (0xF0F,), 8),
    ("cvt.rn.bf16.f32", "f32", "bf16", (1 + 2**-8,), 1.0),
    ("cvt.rn.bf16.f32", "f32", "bf16", (1 + 3 * 2**-8,), 1 + 2**-6), ("cvt.f32.bf16", "bf16", "f32", (-2.5,), -2.5),
    ("cvt.rn.f16.f32", "f32", "f16", (1e6,), math.inf),
    ("cvt.rn.bf16x2.f32", "f32 f32", "u32", (1.0, -2.0), 0x3F80C000), ("cvt.rzi.s32.f32", "f32", "s32", (-2.9,), -2),
    ("cvt.rzi.s32.f32", "f32", "s32", (1e20,), 2**31 - 1), ("cvt.rzi.s32.f32", "f32", "s32", (math.nan,), 0),
    ("cvt.rn.f32.s64", "s64", "f32", (2**24 + 1,), 2.0**24), ("cvt.rn.f32.f64", "f64", "f32", (0.5,), 0.5),
    ("cvt.s8.s32", "s32", "s16", (0x180,), -128), ("cvt.s64.s32", "s32", "s64", (-5,), -5),
    ("cvt.u64.u32", "u32", "u64", (2**32 - 5,), 2**32 - 5),
]  # fmt: skip


@pytest.mark.parametrize("opcode, kinds, to, values, expected", COMPUTED)
def test_computes(opcode, kinds, to, values, expected):
    assert computed(opcode, kinds.split(), to, *values) == bits(expected, to)


@pytest.mark.parametrize(
    "compare, values, expected",
    [
        ("lt.s32", (-1, 1), True), ("lt.u32", (-1, 1), False), ("ne.f32", (math.nan, 1.0), False),
        ("neu.f32", (math.nan, 1.0), True), ("num.f32", (1.0, 2.0), True), ("nan.f32", (1.0, math.nan), True),
        ("le.f32", (1.0, 1.0), True), ("gtu.f32", (1.0, 2.0), False),
    ],
)  # fmt: skip
def test_compares(compare, values, expected):
    kind = compare.split(".")[1]
    out = torch.zeros(32, dtype=torch.int32)
    one, other = (bits(value, kind) for value in values)
    run(f"mov.b32 %r3, {one};\nmov.b32 %r4, {other};\nsetp.{compare} %p1, %r3, %r4;\nselp.b32 %r5, 1, 0, %p1;\n"
        "st.global.b32 [%rd10], %r5;\nret;", out)  # fmt: skip
    assert out.tolist() == [int(expected)] * 32


def test_threads_that_part_ways_meet_again():
    """Even threads count to their number, odd ones do not; all pass the barrier."""
    out = torch.zeros(64, dtype=torch.int32)
    run("""
        mov.b32 %r3, 0;
        and.b32 %r4, %r1, 1;
        setp.ne.b32 %p1, %r4, 0;
        @%p1 bra $odd;
        $again:
        add.s32 %r3, %r3, 1;
        setp.lt.s32 %p2, %r3, %r1;
        @%p2 bra $again;
        bra.uni $end;
        $odd:
        mov.b32 %r3, 100;
        $end:
        bar.sync 0;
        st.global.b32 [%rd10], %r3;
        ret;
    """, out, threads=64)  # fmt: skip
    assert out.tolist() == [100 if i % 2 else max(i, 1) for i in range(64)]


def test_lanes_exchange_and_reduce():
    out = torch.zeros(6, 64, dtype=torch.int32)
    stores = "".join(f"st.global.b32 [%rd10 + {256 * i}], %r{10 + i};\n" for i in range(6))
    run(f"""
        mov.b32 %r5, 3;
        shfl.sync.bfly.b32 %r10, %r1, 1, 31, -1;
        shfl.sync.up.b32 %r11, %r1, 2, 0, -1;
        shfl.sync.idx.b32 %r12, %r1, %r5, 31, -1;
        redux.sync.add.s32 %r13, %r1, -1;
        redux.sync.min.s32 %r14, %r1, -1;
        redux.sync.max.s32 %r15, %r1, -1;
        {stores} ret;
    """, out, threads=64)  # fmt: skip
    lane, warp = torch.arange(64) % 32, torch.arange(64) // 32 * 32
    expected = [lane ^ 1, torch.where(lane < 2, lane, lane - 2), torch.full((64,), 3)]
    assert torch.equal(out[:3], torch.stack([one + warp for one in expected]).int())
    sums = torch.stack([torch.arange(32).sum() + 32 * warp, warp, warp + 31])
    assert torch.equal(out[3:], sums.int())
    with pytest.raises(PTXError, match="parts of a warp"):
        run("shfl.sync.bfly.b32 %r10, %r1, 1, 15, -1;\nret;")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_matrices_through_shared_memory(dtype):
    """A [16, 16] and B [16, 8], which ldmatrix deals to the lanes of a warp, plus C [16, 8]."""
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    out, kind = torch.zeros(16, 8), "bf16" if dtype == torch.bfloat16 else "f16"
    run(f"""
        shl.b32 %r3, %r1, 4;
        cvt.u64.u32 %rd11, %r3;
        add.s64 %rd12, %rd1, %rd11;
        cp.async.cg.shared.global [ %r3 + 0 ], [ %rd12 + 0 ], 0x10;
        setp.lt.u32 %p1, %r1, 16;
        add.s64 %rd13, %rd2, %rd11;
        @%p1 cp.async.cg.shared.global [ %r3 + 512 ], [ %rd13 + 0 ], 0x10;
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        and.b32 %r4, %r1, 15;
        shl.b32 %r4, %r4, 5;
        and.b32 %r5, %r1, 16;
        add.s32 %r4, %r4, %r5;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r4];
        and.b32 %r6, %r1, 15;
        shl.b32 %r6, %r6, 4;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r14, %r15}}, [%r6+512];
        shr.u32 %r7, %r1, 2;
        and.b32 %r8, %r1, 3;
        shl.b32 %r7, %r7, 5;
        shl.b32 %r8, %r8, 3;
        add.s32 %r7, %r7, %r8;
        cvt.u64.u32 %rd14, %r7;
        add.s64 %rd15, %rd3, %rd14;
        ld.global.v2.b32 {{%r20, %r21}}, [%rd15 + 0];
        ld.global.v2.b32 {{%r22, %r23}}, [%rd15 + 256];
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r24, %r25, %r26, %r27}},
            {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r20, %r21, %r22, %r23}};
        add.s64 %rd16, %rd4, %rd14;
        st.global.v2.b32 [%rd16 + 0], {{%r24, %r25}};
        st.global.v2.b32 [%rd16 + 256], {{%r26, %r27}};
        ret;
    """, a, b, c, out, shared=768)  # fmt: skip
    assert torch.allclose(out.double(), a.double() @ b.double() + c, rtol=1e-6, atol=1e-6)


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


TICKET = """
    mul.wide.u32 %rd11, %r2, 128;
    add.s64 %rd12, %rd10, %rd11;
    {before} st.global.b32 [%rd12], %r1;
    {barrier}
    setp.eq.b32 %p1, %r1, 0;
    mov.b32 %r3, 1;
    @%p1 atom.global.gpu.{order}.add.u32 %r4, [%rd2], %r3;
    {late}
    mov.b32 %r9, 0;
    @%p1 st.shared.b32 [%r9], %r4;
    bar.sync 0;
    ld.shared.b32 %r5, [%r9];
    setp.ne.b32 %p2, %r5, 2;
    @%p2 bra $end;
    ld.global.b32 %r6, [%rd10];
    ld.global.b32 %r7, [%rd10 + 128];
    ld.global.b32 %r8, [%rd10 + 256];
    add.s32 %r6, %r6, %r7;
    add.s32 %r6, %r6, %r8;
    add.s64 %rd13, %rd3, %rd9;
    st.global.b32 [%rd13], %r6;
    $end:
    ret;
"""


def ticketed(order="acq_rel", barrier="bar.sync 0;", before="", late="", run_order=0):
    parts, tickets, out = (torch.zeros(size, dtype=torch.int32) for size in (96, 1, 64))
    body = TICKET.format(order=order, barrier=barrier, before=before, late=late)
    run(body, parts, tickets, out, grid=3, threads=32, shared=4, order=run_order)
    return out


def test_the_last_of_several_programs_reads_what_all_have_stored():
    for order in range(12):
        assert torch.equal(ticketed(run_order=order)[:32], 3 * torch.arange(32, dtype=torch.int32))


@pytest.mark.parametrize(
    "change",
    [dict(order="relaxed"), dict(order="acquire"), dict(order="release"), dict(barrier=""),
     dict(before="setp.eq.b32 %p3, %r1, 77;\n@%p3", late="st.global.b32 [%rd12], %r1;")],
    ids=str,
)  # fmt: skip
def test_tickets_that_order_nothing(change):
    for order in range(6):
        with pytest.raises(Fault, match="in no order") as found:
            ticketed(**change, run_order=order)
        assert found.value.kind == "race"


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


def test_an_order_repeats():
    def taken(order):
        out = torch.zeros(3, dtype=torch.int32)
        run("""
            setp.eq.b32 %p1, %r1, 0;
            mov.b32 %r3, 1;
            @%p1 atom.global.gpu.acq_rel.add.u32 %r4, [%rd2], %r3;
            mul.wide.u32 %rd11, %r2, 4;
            add.s64 %rd12, %rd1, %rd11;
            @%p1 st.global.b32 [%rd12], %r4;
            ret;
        """, out, torch.zeros(1, dtype=torch.int32), grid=3, order=order)  # fmt: skip
        return tuple(out.tolist())

    runs = [taken(order) for order in range(20)]
    assert runs == [taken(order) for order in range(20)] and len(set(runs)) > 3
