"""A batch may live in any rows of a state whose tensors are views of pages: every operation does there what it does to
the rows by themselves, and touches no others."""

import copy

import pytest
import torch

from fastkv import ops
from fastkv.cache.pages import ALIGNMENT, PageFormat
from fastkv.ops.operator import flat
from fastkv.reference import LayerState

from .states import BACKENDS, assert_same, in_pages
from .test_ops import CASES, flattened

CASES_OF_STATES = [name for name in CASES if any(isinstance(one, LayerState) for one in CASES[name]("reference")[0])]
ROWS, PAGES = [5, 2, 4], 7


def batch_of(arguments):
    """Three different sequences made of the one of a case: other numbers, and one that holds fewer tokens."""

    def grown(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.cat([value, -0.5 * value, 0.7 * value.flip(-1)])
        if isinstance(value, torch.Tensor):
            return torch.cat([value] * 3)
        if isinstance(value, LayerState):
            made = copy.deepcopy(value)
            for name, tensor in list(made.named_tensors()):
                made.replace(name, torch.cat([tensor] * 3) if "spread" in name or "count" in name else grown(tensor))
            made.exact.lengths[1] -= 3
            return made
        if isinstance(value, tuple):
            rows = [grown(one) for one in value]
            return type(value)(*rows) if hasattr(value, "_fields") else tuple(rows)
        return value

    return [grown(argument) for argument in arguments]


def state_of(arguments):
    return next(one for one in arguments if isinstance(one, LayerState))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES_OF_STATES)
def test_rows_of_pages(name, backend):
    torch.manual_seed(0)
    arguments = batch_of(CASES[name](backend)[0])
    state = state_of(arguments)
    placed = in_pages(state, ROWS, PAGES)
    before = copy.deepcopy(placed)
    operator = getattr(ops, name.split()[0])
    expected = operator(*arguments)
    found = operator(*(placed if one is state else one for one in arguments))
    pairs = zip(found or (), expected or ()) if not isinstance(found, torch.Tensor) else [(found, expected)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    for (_, mine), (_, theirs) in zip(placed.taken().named_tensors(), state.named_tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    others = torch.tensor([row for row in range(1, PAGES) if row not in ROWS])
    assert_same(placed.at(others).taken(), before.at(others).taken())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES_OF_STATES)
def test_row_0_is_nobody_s(name, backend):
    """It may come as often as needed, and what the others get does not depend on it."""
    torch.manual_seed(0)
    arguments = batch_of(CASES[name](backend)[0])
    state = state_of(arguments)
    placed, again = (in_pages(state, ROWS, PAGES) for _ in range(2))
    again.rows = torch.tensor([0, ROWS[1], 0])
    operator = getattr(ops, name.split()[0])
    expected = operator(*(placed if one is state else one for one in arguments))
    found = operator(*(again if one is state else one for one in arguments))
    pairs = zip(found or (), expected or ()) if not isinstance(found, torch.Tensor) else [(found, expected)]
    for mine, theirs in pairs:
        if len(theirs):
            torch.testing.assert_close(mine[1], theirs[1], atol=1e-6, rtol=1e-6)
    kept = torch.tensor(ROWS[1:2])
    for (_, mine), (_, theirs) in zip(again.at(kept).taken().named_tensors(), placed.at(kept).taken().named_tensors()):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["decode_step", "evict", "prefill_attention with centroids"])
def test_operators_with_rows_pass_opcheck(name):
    operator, pieces, found = flattened(name, "auto")
    placed = in_pages(found[0], [2], 3)
    old, new = (flat(LayerState, state) for state in (found[0], placed))
    start = next(i for i, piece in enumerate(pieces) if isinstance(piece, list) and piece and piece[0] is old[0][0])
    pieces[start : start + len(old)] = new
    torch.library.opcheck(operator.default, tuple(pieces))


def test_pages_are_aligned_and_disjoint():
    state = state_of(CASES["decode_step with centroids"]("reference")[0])
    form = PageFormat.of(state)
    placed = form.allocate(3, "cpu")
    ends = 0
    for name, tensor in placed.named_tensors():
        first = tensor.data_ptr() - placed.exact.keys.data_ptr() + form.places["exact.keys"]
        assert first == form.places[name] and first % ALIGNMENT == 0 and first >= ends
        ends = first + tensor[0].numel() * tensor.itemsize
        assert tensor.dtype == dict(state.named_tensors())[name].dtype and not tensor.any()
    assert ends <= form.nbytes < ends + 128
