"""Tokenizer, shape and starting weights of the bundled model: random, but for an induction circuit in two layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from fastkv.demo.tasks import VOCABULARY

HEAD_DIM = 64
ROPE_THETA = 500_000.0


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of `VOCABULARY`, `<bos>` in front; pads on the left."""
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", ids["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def config() -> LlamaConfig:
    """Four layers, four query heads and two KV heads of `HEAD_DIM`."""
    tokenizer = build_tokenizer()
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


@torch.no_grad()
def initialise(model: LlamaForCausalLM | Qwen3ForCausalLM, generator: torch.Generator) -> None:
    """Random weights with a rough induction circuit in the first two layers.

    Every embedding is a random unit vector plus one common unit vector. Layer 0: queries and keys read only the common
    vector, so RoPE alone decides, and heads 0, 1, 2 look 1, 2, 3 words back and copy part of that word into a subspace
    of their own. Layer 1: two heads attend to the words that follow an earlier occurrence of the current word, two to
    those that stand two words after an earlier occurrence of the previous word, and all copy what they find. The later
    layers and all MLPs start at zero output.
    """
    layers = model.model.layers
    hidden, dim = model.config.hidden_size, layers[0].self_attn.head_dim
    basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q.T
    common, word, one_back, two_back, three_back = basis.split([1, dim, dim, dim, hidden - 1 - 3 * dim])
    common = common[0]

    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(std=hidden**-0.5, generator=generator)
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()

    embedding = model.model.embed_tokens.weight
    embedding -= torch.outer(embedding @ common, common)
    embedding.copy_(F.normalize(embedding, dim=1) + common)

    # The fastest rotations tell neighbours apart; a query turned back by d rotates into the key d words earlier.
    fast, sharpness = 6, 18.0
    rotation = ROPE_THETA ** (-torch.arange(dim // 2) / (dim // 2))[:fast]
    reader = common / (hidden / 2) ** 0.5  # gives 1 on every normed embedding
    first = layers[0].self_attn
    key = torch.zeros(dim)
    key[:fast] = sharpness
    first.k_proj.weight.copy_(torch.outer(key.repeat(2), reader))
    first.v_proj.weight.copy_(word.repeat(2, 1))
    for head, target in enumerate((one_back, two_back, three_back)):
        query = torch.zeros(dim)
        query[:fast] = sharpness * torch.cos((head + 1) * rotation)
        query[dim // 2 : dim // 2 + fast] = -sharpness * torch.sin((head + 1) * rotation)
        first.q_proj.weight[head * dim : (head + 1) * dim] = torch.outer(query, reader)
        first.o_proj.weight[:, head * dim : head * dim + len(target)] = 0.1 * target.T

    second = layers[1].self_attn
    second.k_proj.weight.copy_(1.4 * torch.cat([one_back, two_back]))
    second.q_proj.weight.copy_(1.4 * torch.cat([word, word, one_back, one_back]))
    copied = torch.linalg.qr(torch.randn(hidden, 2 * dim, generator=generator)).Q.T
    second.v_proj.weight.copy_(copied)
    second.o_proj.weight.copy_(0.3 * copied.view(2, dim, hidden).repeat_interleave(2, dim=0).flatten(0, 1).T)
