"""Random weights of named shapes, and who is measured on them, as a case says: the full cache, fastkv and kvpress.

Peers are imported where they are used.
"""

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM

from fastkv.lab.timing import Compressed, Full

from .cases import Case

PROBE = 64  # tokens of the prompt whose logits must agree
LONGEST = 262_144  # positions
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
).split()
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
Shape = tuple[str, tuple[int, ...], dict[str, Any]]  # type in transformers, numbers of `SIZES`, what else differs


def gemma(*sizes: int, window: int = 1024) -> Shape:
    """Of Gemma 3: every sixth layer attends to everything, the others to a window."""
    window_of = {"sliding_window": window, "sliding_window_pattern": 6, "query_pre_attn_scalar": sizes[-1]}
    return "gemma3_text", sizes, TIED | window_of


SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": ("llama", (128_256, 4096, 14_336, 32, 32, 8, 128), UNTIED),
    "qwen3-8b": ("qwen3", (151_936, 4096, 12_288, 36, 32, 8, 128), UNTIED),
    "llama-small": ("llama", (1000, 256, 688, 4, 4, 2, 64), UNTIED),
    "qwen3-small": ("qwen3", (1000, 256, 768, 4, 8, 2, 64), TIED),
    "gemma-3-small": gemma(1000, 256, 1024, 6, 4, 2, 64),
    "llama-toy": ("llama", (97, 32, 48, 2, 4, 2, 16), UNTIED),
    "gemma-3-toy": gemma(97, 32, 48, 6, 4, 2, 16, window=16),
}


@torch.no_grad()
def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A model in eval mode, the same under every version of transformers: every matrix is drawn by a generator seeded
    with its name; vectors stay as made.
    """
    kind, sizes, more = SHAPES[name]
    settings = {**dict(zip(SIZES, sizes)), **more, "max_position_embeddings": LONGEST}
    config = AutoConfig.for_model(kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for key, weight in model.named_parameters():
        if weight.ndim > 1:
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(key.encode()))
            weight.normal_(0, 0.02, generator=generator)
    return model


def prompt(name: str, batch: int, length: int, device: torch.device) -> Tensor:
    """Seeded token ids [batch, length], without the special ones."""
    words = SHAPES[name][1][0]
    return torch.randint(3, words, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)


@torch.no_grad()
def checksum(model: Any, name: str) -> str:
    """CRC-32 of the stock model's logits for a short prompt, bit for bit."""
    logits = model(prompt(name, 1, PROBE, model.device)).logits
    return f"{zlib.crc32(logits.float().cpu().numpy().tobytes()):08x}"


def weight_bytes(model: Module) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table, of which it needs one row."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else table.nbytes)


# Same score and hyper-parameters as fastkv's policy of that name.
PRESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "keydiff": ("KeyDiffPress", {}),
    "snapkv": ("SnapKVPress", {"window_size": 32, "kernel_size": 7}),
    "compactor": ("CompactorPress", {"blending": 0.3}),
}


class Generates(Full):
    """A model that is measured as a case says; by itself, with the full cache."""

    def __init__(self, model: Any, case: Case) -> None:
        super().__init__(model, case.step, case.room, case.block)
        self.case = case

    def generate(self, ids: Tensor, new: int) -> Tensor:
        """The prompt and exactly `new` greedy tokens, by the model's own `generate`."""
        length = {"max_new_tokens": new, "min_new_tokens": new}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)


class FastKV(Compressed, Generates):
    def __init__(self, model: Any, case: Case) -> None:
        import fastkv

        super().__init__(model, case)
        static = {"static": True} if case.step != "eager" else {}
        budget = fastkv.Budget(tokens=case.budget, heads="uniform")  # of random weights none needs more than others
        fastkv.patch(model, case.policy, budget, prefill_block=case.block, evict_every=case.period, **static)


@contextmanager
def placed(model: Any) -> Iterator[None]:
    """Tell layers `cache_position`: presses ask for it, and transformers later than those that kvpress pins do not."""

    def tell(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids, cache = named["input_ids"], named["past_key_values"]
        before = cache.get_seq_length()
        places = torch.arange(before, before + ids.shape[1], device=ids.device)
        return arguments, {"cache_position": places} | named

    hook = model.base_model.register_forward_pre_hook(tell, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class KVPress(Generates):
    """kvpress, as its own pipeline does it: the prompt is read whole under the press, decoding happens outside."""

    def __init__(self, model: Any, case: Case) -> None:
        import kvpress

        super().__init__(model, case)
        name, options = PRESSES[case.policy]
        self.make = lambda ratio: getattr(kvpress, name)(compression_ratio=ratio, **options)

    def pressed(self, length: int) -> AbstractContextManager[Any]:
        """Keeps `budget` of `length` tokens. kvpress truncates length * (1 - ratio), hence the half."""
        if self.case.budget >= length:
            return nullcontext()
        return self.make(1 - (self.case.budget + 0.5) / length)(self.model)

    def read(self, ids: Tensor, cache: Any) -> Tensor:
        """The whole prompt; kvpress has no other way."""
        with placed(self.model), self.pressed(ids.shape[1]):
            return self.model(ids, past_key_values=cache, logits_to_keep=1).logits

    def generate(self, ids: Tensor, new: int) -> Tensor:
        """`generate` under the press, which leaves decode steps alone."""
        with placed(self.model), self.pressed(ids.shape[1]):
            return super().generate(ids, new)

    def kept(self, cache: Any) -> int:
        """Tokens held per KV head of the last layer, which attends to everything in all these models."""
        return cache.layers[-1].keys.shape[2]


CONTENDERS: dict[str, type[Generates]] = {"full": Generates, "fastkv": FastKV, "kvpress": KVPress}
