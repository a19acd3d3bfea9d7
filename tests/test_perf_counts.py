"""`perf.counts`: instructions, waits and barriers of a program, as it comes to them, until it takes its ticket."""

import json

import pytest

from .processes import run

# In a process of its own, where Triton's interpreter is off: of each text of PTX, what one program does.
SCRIPT = """
import json, sys
from types import SimpleNamespace

import numpy as np

from perf.counts import Count, markdown
from tests.ptx.parse import parse
from tests.ptx.test_executor import kernel

found = []
for body in json.loads(sys.argv[1]):
    count, before = Count(), len(parse(kernel("")).code)
    for one in parse(kernel(body)).code[before:]:
        skipped = one.guard is not None  # no thread's predicate holds
        count.note(SimpleNamespace(now=one), np.zeros(32, bool) if skipped else None)
    found.append(count.numbers())
print(json.dumps(found))
print(markdown({"before": {"one": found[0]}, "after": {"one": found[1]}}))
"""
LOADS = "ld.global.b64 %rd11, [%rd10];\nld.global.b32 %r11, [{}];\nadd.s32 %r12, %r11, 1;\n"
COPY = (
    "cp.async.cg.shared.global [%r13], [%rd10], 16;\ncp.async.commit_group;\ncp.async.wait_group {};\nbar.sync 0;\n"
    "{}mov.b32 %r14, %r12;\n"
)
BODIES = {
    "a load whose address was loaded": (LOADS.format("%rd11"), (3, 2, 0)),
    "two loads at once": (LOADS.format("%rd10"), (3, 1, 0)),
    "a copy is waited for": (COPY.format(0, ""), (5, 1, 1)),
    "a copy is not waited for": (COPY.format(1, ""), (5, 0, 1)),
    "after the ticket nothing counts": (COPY.format(0, "atom.global.add.u32 %r15, [%rd10], 1;\n"), (4, 1, 1)),
    "what no thread executes waits for nothing": (
        "ld.global.b64 %rd11, [%rd10];\n@%p1 ld.global.b32 %r11, [%rd11];\nmov.b32 %r14, %r11;\n", (3, 0, 0)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """By name, and the table of the first two."""
    bodies = json.dumps([body for body, _ in BODIES.values()])
    code, said, errors = run(SCRIPT, tmp_path_factory.mktemp("counts"), bodies, env={"TRITON_INTERPRET": "0"})
    assert code == 0, errors
    numbers, *lines = said.splitlines()
    return dict(zip(BODIES, json.loads(numbers))), lines


@pytest.mark.parametrize("name", BODIES)
def test_what_a_program_does_is_counted(name, counted):
    assert tuple(counted[0][name].values()) == BODIES[name][1]


def test_a_table_has_labels_side_by_side(counted):
    *_, line = counted[1]
    assert line.startswith("| one | 3 | 3 | 2 | 1 | 0 | 0 |")
