"""A prompt block's attention to itself by flash-attn, beside slots and evicted tokens: `tests.flash_attn` stands in.

The limit is that of `test_kernels_prefill`: twice the error of the same computation in torch in the dtype of the block.
"""

import pytest
import torch

from fastkv.kernels import _flash
from fastkv.kernels._arguments import Attended
from fastkv.kernels.prefill_attention import prefill_attention

from . import flash_attn
from . import test_kernels_codes as codes
from .pairwise import covering
from .states import in_pages, make_spec
from .test_kernels_prefill import case, check

BF16, FP16 = torch.bfloat16, torch.float16
CALL = [("flash_attn_varlen_func", 140, -1)]
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """flash-attn is there, for tensors on a CPU, too."""
    monkeypatch.setattr(_flash, "flash_attention", lambda device: flash_attn.flash_attn_varlen_func)
    flash_attn.CALLS.clear()


def both(block, state, monkeypatch, **how):
    """What is computed with the package and without: both as near to the truth as they should be."""
    out, lse = check(block, state, **how, padding=False)
    assert flash_attn.CALLS == CALL
    with monkeypatch.context() as without:
        without.setattr(_flash, "flash_attention", lambda device: None)
        check(block, state, **how)
    assert flash_attn.CALLS == CALL
    return out, lse


@pytest.mark.parametrize(
    "groups, dim, dtype, order, parts",
    covering([1, 3, 4], [64, 80, 128, 256], [BF16, FP16], [1, 0, None], [None, 31], together=1),
)
def test_a_block_of_two_rows(groups, dim, dtype, order, parts, monkeypatch):
    """The second has padding, which holds NaN, before its tokens."""
    both(*case(groups=groups, dim=dim, dtype=dtype, num=70, parts=parts), monkeypatch, order=order)


@pytest.mark.parametrize("padded", ["left", "right", "both", "all"])
def test_padding(padded, monkeypatch):
    block, state = case(num=70, dtype=BF16, padding=False)
    q, k, v, valid = block
    valid[0, {"left": slice(9), "right": slice(40, 70), "both": slice(3), "all": slice(70)}[padded]] = False
    valid[0, 60 if padded == "both" else 70 :] = False
    for rows in (q, k, v):
        rows.masked_fill_(~valid[:, None, :, None], float("nan"))
    q.nan_to_num_()
    both(block, state, monkeypatch)


def test_padding_between_tokens_is_attended_to_by_ours(monkeypatch):
    """In that row alone."""
    block, state = case(num=70, dtype=BF16, padding=False)
    block[3][1, 20:22] = False
    both(block, state, monkeypatch)
    out, lse, _ = prefill_attention(*block, state, make_spec(0.125, order=1))
    monkeypatch.setattr(_flash, "flash_attention", lambda device: None)
    alone = prefill_attention(*block, state, make_spec(0.125, order=1))
    assert torch.equal(out[1], alone[0][1]) and torch.equal(lse[1], alone[1][1])
    assert not torch.equal(lse[0], alone[1][0])


def test_nothing_is_retained_or_evicted(monkeypatch):
    out, lse = both(*case(num=70, dtype=BF16, held=0, evicted=0, padding=False), monkeypatch)
    assert lse.isfinite().all()


def test_sinks_are_ours(monkeypatch):
    block, state = case(num=70, groups=4, dtype=BF16)
    state.sink_logits = torch.linspace(-3, 3, 4)
    both(block, state, monkeypatch)


def test_rows_in_pages(monkeypatch):
    block, state = case(num=70, dtype=BF16)
    own = prefill_attention(*block, state, make_spec(0.125, order=1))
    paged = prefill_attention(*block, in_pages(state, [3, 1], 5), make_spec(0.125, order=1))
    assert flash_attn.CALLS == CALL * 2
    for mine, theirs in zip(paged, own):
        real = block[3][:, None].expand(mine.shape[:3])
        assert torch.equal(mine[real], theirs[real])


@pytest.mark.parametrize("slots", ["int8", "int4"])
def test_slots_in_codes(slots, monkeypatch):
    block, state = case(num=70, dtype=BF16)
    both(block, codes.encoded(state, slots), monkeypatch, lse_slack=codes.lse_slack(slots, BF16))


def test_what_it_does_not_serve_is_ours_alone():
    changed = {"dtype": torch.float32}, {"value_dim": 48}, {"num": _flash.FEWEST - 1}, {"dim": 272}
    for given, softcap in (({}, 5.0), *((one, None) for one in changed)):
        block, _ = case(**{"num": 70, "dtype": BF16, **given})
        assert _flash.attend_itself(*block, make_spec(0.125, softcap)) == Attended()
    assert not flash_attn.CALLS
