"""A batch may live in any rows of pages: an operation does there what it does to the rows alone, and to no others."""

import copy
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import fastkv
from fastkv import ops, reference
from fastkv.cache.layer import evict
from fastkv.cache.layout import Layout
from fastkv.cache.pages import ALIGNMENT, PageFormat
from fastkv.kernels import operations, slot_signals
from fastkv.kernels._attention import _home, _page
from fastkv.ops.operator import flat_state
from fastkv.reference import FORMATS, LayerState, Spec

from .models import raises
from .pairwise import covering
from .states import BACKENDS, assert_same, copied, in_pages
from .test_ops import CASES, flattened, sorted_slots
from .test_paged import config_of, paged, read, step, tokens

CASES_OF_STATES = [name for name in CASES if any(isinstance(one, LayerState) for one in CASES[name]("reference")[0])]
ROWS, PAGES = [5, 2], 7
CLOSE = dict(atol=1e-5, rtol=1e-5)
BATCH, REAL = [5, 0, 2, 0], [0, 2]
OF_BATCH = torch.tensor([0, 1, 1, 0])  # whose arguments they are given


def mapped(value, change):
    """An argument of an operator with every tensor changed; names are those of `LayerState.named_tensors`."""
    if isinstance(value, torch.Tensor):
        return change("", value)
    if isinstance(value, LayerState):
        made = copy.deepcopy(value)
        for name, tensor in list(made.named_tensors()):
            made.replace(name, change(name, tensor))
        return made
    if isinstance(value, tuple):
        parts = [mapped(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def batch_of(name, backend):
    """The arguments of a case for two different sequences: other numbers and, where nothing is chosen, a token less."""

    def grown(part, tensor):
        other = -0.5 * tensor if tensor.is_floating_point() else tensor
        return torch.cat([tensor, tensor if "spread" in part or "count" in part else other])

    made = [mapped(argument, grown) for argument in CASES[name](backend)[0]]
    if "chosen" not in name:
        state_of(made).exact.lengths[1] -= 1
        state_of(made).seen[1] -= 1
    return made


def state_of(arguments):
    return next(one for one in arguments if isinstance(one, LayerState))


def tokens_of(state):
    """Its tensors but for attention, slots in order of position and zero where nothing is stored."""
    return {name: part for name, part in sorted_slots(state).named_tensors() if name != "exact.attention"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES_OF_STATES)
def test_rows_of_pages(name, backend):
    """Row 0 is nobody's: it may come as often as needed, and what the others get does not depend on it."""
    torch.manual_seed(0)
    arguments = batch_of(name, backend)
    state = state_of(arguments)
    placed = in_pages(state, ROWS, PAGES)
    before, batch = copy.deepcopy(placed), placed.at(torch.tensor(BATCH))
    operator = getattr(ops, name.split()[0])
    found = operator(*(
        batch if one is state else mapped(one, lambda _, tensor: tensor.index_select(0, OF_BATCH)) for one in arguments
    ))  # fmt: skip
    known = replace(arguments[-1], backend="reference" if backend == "triton" else backend)
    expected = operator(*arguments[:-1], known)
    pairs = zip(found or (), expected or ()) if not isinstance(found, torch.Tensor) else [(found, expected)]
    for mine, theirs in pairs:
        if len(theirs):
            torch.testing.assert_close(mine[REAL], theirs, **CLOSE)
    if name.startswith("decode_step") and backend == "triton":
        out, *lses = (one[[1, 3]] for one in found)
        assert not out.any() and all((lse == -torch.inf).all() for lse in lses)
    named_tensors = tokens_of if name.startswith("compact") else lambda one: dict(one.named_tensors())
    theirs = named_tensors(state)
    for key, mine in named_tensors(placed.taken()).items():
        torch.testing.assert_close(mine, theirs[key], **CLOSE, msg=f"{key} differs")
    others = torch.tensor([row for row in range(1, PAGES) if row not in ROWS])
    assert_same(placed.at(others).taken(), before.at(others).taken())


@pytest.mark.parametrize(
    "name, rows",
    covering([one for one in CASES_OF_STATES if one.startswith("decode_step")], [[3, 4], [4, 3], [5, 2]], together=1),
)
def test_a_cpu_s_steps_copy_no_rows(name, rows, monkeypatch):
    """They work where rows lie, side by side or apart, in any order, and touch no others."""
    torch.manual_seed(0)
    arguments = batch_of(name, "cpu")
    state = state_of(arguments)
    placed = in_pages(state, rows, PAGES)
    before = copy.deepcopy(placed)
    with monkeypatch.context() as patch:
        patch.setattr(LayerState, "taken", None)
        found = getattr(ops, name.split()[0])(*(placed if one is state else one for one in arguments))
    torch.testing.assert_close(found, getattr(ops, name.split()[0])(*arguments), **CLOSE)
    theirs = dict(state.named_tensors())
    for key, mine in placed.taken().named_tensors():
        torch.testing.assert_close(mine, theirs[key], **CLOSE, msg=f"{key} differs")
    others = torch.tensor([row for row in range(1, PAGES) if row not in rows])
    assert_same(placed.at(others).taken(), before.at(others).taken())


def test_nobody_s_row_never_fills_up():
    """However many tokens come to it."""
    for backend in ("reference", "cpu", "triton"):
        arguments = batch_of("decode_step", backend)
        state = state_of(arguments)
        placed = in_pages(state, ROWS, PAGES).at(torch.zeros(2, dtype=torch.int64))
        for _ in range(state.exact.limit + 2):
            ops.decode_step(*(placed if one is state else one for one in arguments))
        assert placed.exact.lengths[0].max() <= 1


def after_two_prompts(policy, correction):
    """A layer of the reference that read two prompts, into pages 3 and 1 of five, and decoded three tokens of each."""
    made, texts = paged(config_of(policy, correction, backend="reference")), (tokens(27, 1), tokens(27, 2))
    for row, text in zip((3, 1), texts):
        read(made, row, [part[:, :, :24] for part in text])
    for place in range(24, 27):
        step(made, [3, 1], texts, [place] * 2)
    return made


@pytest.mark.parametrize("policy", ["keydiff", "momentkv", "snapkv", "noncausal", "noncausal of many"])
def test_evictions_happen_in_pages(policy, monkeypatch):
    """Nothing is written back but what is found by sorting, and rows that are not due stay as they are."""
    policy, _, many = policy.partition(" ")
    layer = after_two_prompts(policy, "centroids" if policy == "snapkv" else "auto")
    one, rule = layer.state.at(torch.tensor([1])), layer.rule
    other, others = copied(one), torch.tensor([2, 3, 4])
    before = other.at(others).taken()
    evict(one, rule)
    monkeypatch.setattr(*(slot_signals, "FEW", 0) if many else (LayerState, "put", None))
    evict(other.at(torch.tensor([0, 1, 0])), replace(rule, spec=replace(rule.spec, backend="triton")))
    theirs = tokens_of(one.taken())
    assert int(theirs["exact.lengths"].max()) == 12
    for key, mine in tokens_of(other.taken()).items():
        torch.testing.assert_close(mine, theirs[key], atol=1e-4, rtol=1e-4, msg=f"{key} differs")
    assert_same(other.at(others).taken(), before)


@triton.jit
def _distance_kernel(tensor_ptr, rows_ptr, page, distance_ptr, own_ptr, HEADS: tl.constexpr):
    pair = tl.program_id(0)
    row, own = _home(rows_ptr, page, pair, HEADS)
    tl.store(distance_ptr + pair, _page(tensor_ptr, row, page).to(tl.int64) - tensor_ptr.to(tl.int64))
    tl.store(own_ptr + pair, own)


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_pages_may_be_far_apart(dtype, index):
    """Pages of 2 GiB and 128 bytes: neither bytes nor numbers nor units of 16 bytes fit into 32 bits."""
    page, rows, heads = 2**27 + 8, torch.tensor([3, 0, 40], dtype=index), 2
    distance, own = torch.zeros(2, 6, dtype=torch.int64)
    _distance_kernel[6,](torch.zeros(1, dtype=dtype), rows, page, distance, own, heads)
    assert torch.equal(distance, 16 * page * rows.long().repeat_interleave(heads))
    assert own.tolist() == [0, 1] * 3
    _distance_kernel[6,](torch.zeros(1, dtype=dtype), rows, None, distance, own, heads)
    assert not distance.any() and own.tolist() == [6, 7, 0, 1, 80, 81]


def test_pages_that_kernels_cannot_address_are_refused():
    arguments = batch_of("decode_step", "triton")
    placed = in_pages(state_of(arguments), ROWS, PAGES)
    arguments[3] = placed
    for name, tensor in (
        ("attention", placed.exact.attention.contiguous()),  # a copy, whose rows are not a page apart
        ("lengths", placed.exact.lengths.as_strided((PAGES, 2), (placed.exact.lengths.stride(0), 2))),
    ):
        kept = getattr(placed.exact, name)
        setattr(placed.exact, name, tensor)
        raises("must be contiguous in every page", operations.decode_step, *arguments)
        setattr(placed.exact, name, kept)
    raises("rows", operations.decode_step, *arguments[:3], placed.at(torch.tensor([1, 2, 3])), arguments[4])


@pytest.mark.parametrize("name", ["decode_step", "compact"])
def test_operators_with_rows_pass_opcheck(name):
    operator, pieces, found = flattened(name, "auto")
    old, new = (flat_state(state) for state in (found[0], in_pages(found[0], [2], 3)))
    start = next(i for i, piece in enumerate(pieces) if isinstance(piece, list) and piece and piece[0] is old[0][0])
    pieces[start : start + len(old)] = new
    torch.library.opcheck(operator.default, tuple(pieces), test_utils=("test_schema", "test_faketensor"))


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


@pytest.mark.parametrize("slots", ["model", "int4"])
@pytest.mark.parametrize("tokens", [(6, 6), (5, 9)])
def test_copies_of_rows(tokens, slots):
    """One launch copies the bits that torch would, and back, of heads' own slots; so do those that bring tokens."""
    known = dict(mean=7, spare=3, attention=True, memory=True, format=FORMATS[slots])
    like = torch.empty(1, 2, 0, 32, dtype=torch.bfloat16)
    form = PageFormat.of(Layout(tokens, fastkv.corrections.get("centroids"), **known).allocate(like, like))
    state = form.view(torch.randint(0, 120, (PAGES, form.nbytes + 32), dtype=torch.uint8))
    if state.exact.starts is not None:
        state.exact.starts.copy_(form.template.exact.starts)
    chosen = state.at(torch.tensor(ROWS))
    expected, got = chosen.taken(equal=True), ops.taken(chosen, Spec(0.3, backend="triton"), equal=True)
    own = torch.arange(max(tokens) + 3) < torch.tensor(tokens)[:, None] + 3
    for (name, one), (other, same) in zip(got.named_tensors(), expected.named_tensors(), strict=True):
        inside = own if name in state.SLABS else ...
        assert name == other and torch.equal(one[:, inside], same[:, inside]) and one.is_contiguous()
        assert name not in state.SLABS or not one[:, ~own].any()
        one.view(torch.uint8).random_(0, 120)  # also beyond a head's own slots
    twin, batch = form.view(state.pages.clone()), len(ROWS)
    twin.at(chosen.rows).put(got)
    assert not torch.equal(got.exact.keys, expected.exact.keys)
    q, k, v = (torch.randn(100 * batch, heads, 32).to(torch.bfloat16) for heads in (6, 2, 2))
    index = torch.randint(0, 100 * batch, (batch, 70))
    spec = Spec(0.3, backend="triton")
    again, *read = ops.read(chosen, spec, q, k, v, index, True)
    for (_, one), (_, same) in zip(again.named_tensors(), ops.taken(chosen, spec, equal=True).named_tensors()):
        assert torch.equal(one.view(torch.uint8), same.view(torch.uint8))
    assert all(torch.equal(one, same) for one, same in zip(read, reference.blocks_of(q, k, v, index), strict=True))
    places = torch.randperm(100 * batch)[:150], torch.randint(0, batch, (150,)), torch.randint(0, 70, (150,))
    outs = torch.zeros(2, *q.shape, dtype=q.dtype)
    ops.write(chosen, got, read[0], *places, outs[0])
    reference.of_blocks(read[0], *places, outs[1])
    assert torch.equal(state.pages, twin.pages) and torch.equal(*outs)
