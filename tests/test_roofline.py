"""The size of prompt blocks that the device suggests."""

from types import SimpleNamespace

import pytest
import torch

import fastkv
from fastkv.cache import prefill as roofline

from .models import build, generate, prompt

H200 = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132,
    clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6144,
)  # fmt: skip


@pytest.mark.parametrize("dtype,tokens", [(torch.bfloat16, 512), (torch.float32, 512), (torch.float8_e4m3fn, 256)])
def test_a_block_takes_as_long_to_compute_as_its_weights_to_read(monkeypatch, dtype, tokens):
    """H200, by hand: 1070 T operations / 4.92 TB/s = 218 per byte, times bytes per weight, twice over for headroom."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    assert roofline.block_tokens(torch.device("cuda"), dtype) == tokens
    for width, tokens in ((10**6, 128), (10, 2048)):  # within reason
        other = SimpleNamespace(**{**vars(H200), "memory_bus_width": width})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, other=other: other)
        assert roofline.block_tokens(torch.device("cuda"), dtype) == tokens


def test_other_devices_get_a_fixed_size(monkeypatch):
    assert roofline.block_tokens(torch.device("cpu"), torch.float32) == 512
    unknown = SimpleNamespace(**{**vars(H200), "major": 99})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: unknown)
    assert roofline.block_tokens(torch.device("cuda"), torch.bfloat16) == 512


def test_patch_asks_the_device(monkeypatch):
    model, (ids, mask) = build(), prompt()
    budget = fastkv.Budget(tokens=20, sinks=2, recent=4)
    fastkv.patch(model, "keydiff", budget, prefill_block="auto")
    assert model._fastkv_config.prefill_block == 512
    monkeypatch.setattr(roofline, "block_tokens", lambda device, dtype: 13)
    fastkv.patch(model, "keydiff", budget, prefill_block="auto")
    found = generate(model, ids, mask)
    fastkv.patch(model, "keydiff", budget, prefill_block=13)
    assert torch.equal(found, generate(model, ids, mask))
